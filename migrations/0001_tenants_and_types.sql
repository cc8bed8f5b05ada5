-- Tenants, event types and their versioned schemas.
-- Everything lives in the schema `postrider`, so that it can share a database with a producer's own tables.
-- The migrator creates that schema before it runs this file.

create table postrider.tenants (
    id         int generated always as identity primary key,
    -- The caller's own id of the tenant, used in URLs and by `emit`.
    slug       text not null check (slug ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$'),
    name       text,
    created_at timestamptz not null default clock_timestamp(),
    deleted_at timestamptz,
    -- Default rotation interval for the secrets of the tenant's endpoints. Null: never.
    rotate_every_days smallint check (rotate_every_days between 7 and 730),
    -- How long the tenant's events are kept. Never longer than the global setting.
    retention_days smallint check (retention_days between 1 and 3650),
    -- Set for the team that operates Postrider: its endpoints may receive the operational events of every tenant.
    all_operational_events boolean not null default false
);
-- The slug of a deleted tenant can be reused. Rows of the deleted tenant keep the old id.
create unique index tenants_slug on postrider.tenants (slug) where deleted_at is null;
create index tenants_operational on postrider.tenants (id) where all_operational_events and deleted_at is null;

create table postrider.event_types (
    id          int generated always as identity primary key,
    name        text not null
        check (name ~ '^[a-z0-9_]+(\.[a-z0-9_]+)*$' and octet_length(name) <= 128),
    description text,
    -- Every subscription pattern that matches this type: `invoice.paid` has {*, invoice.*, invoice.paid}.
    -- An endpoint is subscribed if its `types` overlap with these, so that matching is one array operator.
    matches     text[] not null,
    -- The body of a thin type carries only the object's id and type. Receivers fetch the rest from the API.
    thin        boolean not null default false,
    created_at  timestamptz not null default clock_timestamp(),
    deleted_at  timestamptz
);
create unique index event_types_name on postrider.event_types (name) where deleted_at is null;

-- Sort key of a version: runs of digits compare as numbers, everything else character by character. A number is prefixed
-- with its count of digits. The version itself is appended, so that no two versions compare equal.
-- The only function outside `functions/`: a stored column depends on it, so a change would have to rewrite that column.
create function postrider.version_rank(version text) returns text language sql immutable strict as $$
    select string_agg(
        case when p.part[1] ~ '^[0-9]'
             then lpad(length(ltrim(p.part[1], '0'))::text, 2, '0') || ltrim(p.part[1], '0')
             else p.part[1] end, '' order by p.n) || ' ' || version
    from regexp_matches(version, '[0-9]+|[^0-9]+', 'g') with ordinality as p (part, n)
$$;
revoke all on function postrider.version_rank from public;

create table postrider.schemas (
    id         int generated always as identity primary key,
    type_id    int not null references postrider.event_types,
    version    text not null check (version ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$'),
    schema     json not null,             -- json, not jsonb: keeps the text as it was published
    created_at timestamptz not null default clock_timestamp(),
    -- The highest rank is the type's newest version, in whatever order versions were published.
    rank       text collate "C" generated always as (postrider.version_rank(version)) stored,
    -- Whether an event of this version was ever emitted. The first emit sets it, unless another transaction is about to.
    -- Repeatable read and serializable transactions leave it alone: they would fail if another one came first.
    emitted    boolean not null default false,
    unique (type_id, version)
);
create unique index schemas_rank on postrider.schemas (type_id, rank);

-- Operational event types, which Postrider emits itself. Endpoints subscribe to them by name; `*` does not match them.
with type as (
    insert into postrider.event_types (name, description, matches) values
        ('postrider.endpoint.disabled', 'An endpoint was disabled because it returned 410 or failed for five days',
         '{postrider.*,postrider.endpoint.*,postrider.endpoint.disabled}'),
        ('postrider.secret.rotating', 'A signing secret will be replaced: fetch the new one while both are valid',
         '{postrider.*,postrider.secret.*,postrider.secret.rotating}'),
        ('postrider.delivery.dead', 'A delivery became a dead letter',
         '{postrider.*,postrider.delivery.*,postrider.delivery.dead}'),
        ('postrider.endpoint.recovered',
         'An endpoint that was disabled, or had been failing for minutes, accepted a delivery again',
         '{postrider.*,postrider.endpoint.*,postrider.endpoint.recovered}'),
        ('postrider.alert.dead_letters', 'An endpoint reached the dead letter threshold of its alert',
         '{postrider.*,postrider.alert.*,postrider.alert.dead_letters}')
    returning id, name
)
insert into postrider.schemas (type_id, version, schema)
select id, '2026-11-01', case name
    when 'postrider.endpoint.disabled' then '{
  "type": "object",
  "properties": {
    "endpoint": {"type": "string"},
    "url": {"type": "string"},
    "reason": {"type": "string", "enum": ["gone", "failing"]}
  },
  "required": ["endpoint", "url", "reason"]
}'::json
    when 'postrider.secret.rotating' then '{
  "type": "object",
  "properties": {
    "endpoint": {"type": "string"},
    "url": {"type": "string"},
    "rotates_at": {"type": "string", "format": "date-time"},
    "overlap_seconds": {"type": "integer"}
  },
  "required": ["endpoint", "url", "rotates_at", "overlap_seconds"]
}'::json
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
from type order by id;
