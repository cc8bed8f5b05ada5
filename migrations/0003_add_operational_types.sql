-- Types of the events that Postrider itself emits. Endpoints ask for them by name; `*` does not match them.
with type as (
    insert into postrider.event_types (name, description, matches) values
        ('postrider.endpoint.disabled', 'An endpoint was disabled: it answered 410, or failed for five days',
         '{postrider.*,postrider.endpoint.*,postrider.endpoint.disabled}')
    returning id
)
insert into postrider.schemas (type_id, version, schema)
select id, '2026-11-01', '{
  "type": "object",
  "properties": {
    "endpoint": {"type": "string"},
    "url": {"type": "string"},
    "reason": {"type": "string", "enum": ["gone", "failing"]}
  },
  "required": ["endpoint", "url", "reason"]
}' from type;
