-- More of what Postrider itself has to say, and to whom.

-- Of the team that runs Postrider: its endpoints may hear of every tenant.
alter table postrider.tenants add column all_operational_events boolean not null default false;
create index tenants_operational on postrider.tenants (id) where all_operational_events and deleted_at is null;

with type as (
    insert into postrider.event_types (name, description, matches) values
        ('postrider.delivery.dead', 'A delivery became a dead letter',
         '{postrider.*,postrider.delivery.*,postrider.delivery.dead}'),
        ('postrider.endpoint.recovered', 'An endpoint that was disabled, or had failed for minutes, took a delivery again',
         '{postrider.*,postrider.endpoint.*,postrider.endpoint.recovered}'),
        ('postrider.alert.dead_letters', 'The dead letters of an endpoint passed the threshold that was asked for',
         '{postrider.*,postrider.alert.*,postrider.alert.dead_letters}')
    returning id, name
)
insert into postrider.schemas (type_id, version, schema)
select id, '2026-11-01', case name
    when 'postrider.delivery.dead' then '{
  "type": "object",
  "properties": {
    "tenant": {"type": "string"},
    "delivery": {"type": "string"},
    "event": {"type": "string"},
    "type": {"type": "string"},
    "endpoint": {"type": "string"},
    "url": {"type": "string"},
    "reason": {"type": "string"},
    "attempts": {"type": "integer"},
    "last_status": {"type": ["integer", "null"]},
    "last_error": {"type": ["string", "null"]},
    "link": {"type": ["string", "null"]}
  },
  "required": ["tenant", "delivery", "event", "type", "endpoint", "url", "reason", "attempts"]
}'::json
    when 'postrider.endpoint.recovered' then '{
  "type": "object",
  "properties": {
    "tenant": {"type": "string"},
    "endpoint": {"type": "string"},
    "url": {"type": "string"},
    "failing_since": {"type": "string", "format": "date-time"},
    "dead_letters": {"type": "integer"},
    "link": {"type": ["string", "null"]}
  },
  "required": ["tenant", "endpoint", "url", "failing_since", "dead_letters"]
}'::json
    else '{
  "type": "object",
  "properties": {
    "tenant": {"type": "string"},
    "endpoint": {"type": "string"},
    "url": {"type": "string"},
    "dead_letters": {"type": "integer"},
    "threshold": {"type": "integer"},
    "type": {"type": ["string", "null"]},
    "reason": {"type": ["string", "null"]},
    "last_status": {"type": ["integer", "null"]},
    "last_error": {"type": ["string", "null"]},
    "link": {"type": ["string", "null"]}
  },
  "required": ["tenant", "endpoint", "url", "dead_letters", "threshold"]
}'::json end
from type;

-- Emits an operational event to the tenant it is about and to those that hear of every tenant. Answers why the tenant
-- itself did not get it, if it did not.
create function postrider.announce(about int, type text, data jsonb) returns text language plpgsql as $$
declare
    v_row     record;
    v_done    postrider.emission;
    v_data    text;
    v_refusal text := 'PR404';
begin
    select (jsonb_build_object('tenant', t.slug) || data)::text into v_data from postrider.tenants t where t.id = about;
    for v_row in
        select t.id, t.slug from postrider.tenants t
        where t.deleted_at is null and (t.id = about or t.all_operational_events) order by t.id
    loop
        v_done := postrider.emit_against(v_row.slug, type, v_data, null, null, null, true, null);
        if v_row.id = about then
            v_refusal := v_done.refusal;
        end if;
    end loop;
    return v_refusal;
end $$;
revoke all on function postrider.announce from public;

-- What is to be told and was not yet. Written by the statement that made it so, told by a dispatcher soon after.
create table postrider.notices (
    id          bigint generated always as identity primary key,
    endpoint_id int not null,
    -- Of a dead letter; null: the endpoint has recovered.
    event_id    uuid,
    reason      postrider.dead_reason,
    attempt     smallint,
    since       timestamptz
);

-- Once for each row that is written: ordinary deliveries write none.
create function postrider.notice_dead() returns trigger language plpgsql as $$
begin
    if (exists (select from postrider.endpoints e
                where e.tenant_id = new.tenant_id and e.state in ('active', 'paused')
                  and e.types && '{postrider.*,postrider.delivery.*,postrider.delivery.dead}')
        or exists (select from postrider.tenants t join postrider.endpoints e on e.tenant_id = t.id
                   where t.all_operational_events and t.deleted_at is null and e.state in ('active', 'paused')
                     and e.types && '{postrider.*,postrider.delivery.*,postrider.delivery.dead}'))
       -- Never of an operational event: it would be an event about itself.
       and not exists (select from postrider.event_types y where y.id = new.type_id and y.name like 'postrider.%')
    then
        insert into postrider.notices (endpoint_id, event_id, reason, attempt)
        values (new.endpoint_id, new.event_id, new.reason, new.attempt);
    end if;
    return null;
end $$;
create trigger dead_letters_notice after insert on postrider.dead_letters
    for each row execute function postrider.notice_dead();

-- A row of `endpoint_health` goes with the first success.
alter table postrider.endpoint_health add column disabled boolean not null default false;
create function postrider.notice_recovered() returns trigger language plpgsql as $$
begin
    if (old.disabled or old.failing_since < clock_timestamp() - interval '5 minutes')
       -- One that takes nothing but operational events is not reported on.
       and exists (select from postrider.endpoints e, unnest(e.types) p
                   where e.id = old.endpoint_id and e.state = 'active' and p not like 'postrider.%')
    then
        insert into postrider.notices (endpoint_id, since) values (old.endpoint_id, old.failing_since);
    end if;
    return null;
end $$;
create trigger endpoint_health_notice after delete on postrider.endpoint_health
    for each row execute function postrider.notice_recovered();

-- One operational event when an endpoint's dead letters pass the threshold, and the next one only after they were fewer.
create table postrider.alerts (
    endpoint_id  int primary key,
    dead_letters bigint not null check (dead_letters between 1 and 1000000000),
    passed_at    timestamptz,
    asked_by     text not null,
    created_at   timestamptz not null default clock_timestamp()
);
