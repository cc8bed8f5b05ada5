-- Rotating secrets every so many days. On an endpoint null is the tenant's policy and 0 is never; on a tenant null is never.
alter table postrider.endpoints add column rotate_every_days smallint
    check (rotate_every_days = 0 or rotate_every_days between 7 and 730);
alter table postrider.tenants add column rotate_every_days smallint
    check (rotate_every_days between 7 and 730);

-- A rotation that was announced. It is of the secret it will replace: when that was replaced by hand, it is void.
create table postrider.planned_rotations (
    secret_id    int primary key references postrider.secrets,
    endpoint_id  int not null,
    announced_at timestamptz not null default clock_timestamp(),
    rotates_at   timestamptz not null
);
create index planned_rotations_due on postrider.planned_rotations (rotates_at);
create index planned_rotations_endpoint on postrider.planned_rotations (endpoint_id);

-- Receivers that refuse our signatures answer so. Few rows are in it.
create index attempts_unauthorized on postrider.attempts (endpoint_id, started_at) where status in (401, 403);

with type as (
    insert into postrider.event_types (name, description, matches) values
        ('postrider.secret.rotating', 'A signing secret will be replaced: fetch the new one while both sign',
         '{postrider.*,postrider.secret.*,postrider.secret.rotating}')
    returning id
)
insert into postrider.schemas (type_id, version, schema)
select id, '2026-11-01', '{
  "type": "object",
  "properties": {
    "endpoint": {"type": "string"},
    "url": {"type": "string"},
    "rotates_at": {"type": "string", "format": "date-time"},
    "overlap_seconds": {"type": "integer"}
  },
  "required": ["endpoint", "url", "rotates_at", "overlap_seconds"]
}' from type;
