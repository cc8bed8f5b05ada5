-- The tables of the spine. Everything lives in one schema, so that it can stand inside a producer's own
-- database without touching what is there. `sqlx` makes the schema before it runs this file.

create type postrider.endpoint_state as enum ('active', 'paused', 'disabled', 'deleted');
create type postrider.signature_format as enum ('t-v1', 'standard');
create type postrider.final_state as enum ('delivered', 'dead');
create type postrider.dead_reason as enum ('exhausted', 'gone', 'endpoint_disabled', 'too_old', 'refused_address');
create type postrider.key_role as enum ('admin', 'producer', 'tenant');

create table postrider.tenants (
    id         int generated always as identity primary key,
    -- The caller's own name for the tenant: what URLs and `emit` use.
    slug       text not null check (slug ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$'),
    name       text,
    created_at timestamptz not null default clock_timestamp(),
    deleted_at timestamptz
);
-- A deleted tenant's slug may be taken again; its rows keep the old number.
create unique index tenants_slug on postrider.tenants (slug) where deleted_at is null;

create table postrider.event_types (
    id          int generated always as identity primary key,
    name        text not null
        check (name ~ '^[a-z0-9_]+(\.[a-z0-9_]+)*$' and octet_length(name) <= 128),
    description text,
    -- Every subscription pattern that matches this type: `invoice.paid` has {*, invoice.*, invoice.paid}.
    -- An endpoint is subscribed when its `types` overlap, so that matching is one array operator.
    matches     text[] not null,
    -- A thin type's body carries only the object's id and type; who wants the rest asks the API for the event.
    thin        boolean not null default false,
    created_at  timestamptz not null default clock_timestamp(),
    deleted_at  timestamptz
);
create unique index event_types_name on postrider.event_types (name) where deleted_at is null;

create table postrider.schemas (
    id         int generated always as identity primary key,  -- the highest is the type's newest version
    type_id    int not null references postrider.event_types,
    version    text not null check (version ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$'),
    schema     json not null,                                 -- json, not jsonb: kept as it was written
    created_at timestamptz not null default clock_timestamp(),
    unique (type_id, version)
);

create table postrider.endpoints (
    id              int generated always as identity primary key,
    public_id       text not null unique,
    tenant_id       int not null references postrider.tenants,
    shard           smallint not null check (shard between 0 and 63),
    url             text not null check (octet_length(url) <= 2048),
    description     text check (octet_length(description) <= 1024),
    types           text[] not null default '{*}' check (cardinality(types) between 1 and 100),
    versions        jsonb,               -- {type: version}: only that version of that type
    filter          json,
    concurrency     smallint check (concurrency between 1 and 1024),           -- null: the setting
    rate_per_second int check (rate_per_second between 1 and 100000),
    ordered         boolean not null default false,
    retry_schedule  int[] check (cardinality(retry_schedule) between 1 and 50), -- waits in ms; null: the setting
    timeout_ms      int check (timeout_ms between 100 and 60000),              -- null: the setting
    signature       postrider.signature_format not null default 't-v1',
    headers         bytea,               -- encrypted: custom headers often hold a token
    state           postrider.endpoint_state not null default 'active',
    state_reason    text,
    created_at      timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp(),
    -- The transaction that last changed the row. Dispatchers find changed settings by it, as they find queue rows.
    xid             xid8 not null default pg_current_xact_id()
);
create index endpoints_tenant on postrider.endpoints (tenant_id, id) where state <> 'deleted';
create index endpoints_shard on postrider.endpoints (shard, id);
create index endpoints_xid on postrider.endpoints (xid);

-- What an endpoint's signatures are made with. Encrypted under the master key, bound to the endpoint.
create table postrider.secrets (
    id          int generated always as identity primary key,
    endpoint_id int not null references postrider.endpoints,
    ciphertext  bytea not null,
    created_at  timestamptz not null default clock_timestamp(),
    retires_at  timestamptz,             -- null: current
    xid         xid8 not null default pg_current_xact_id()
);
create index secrets_endpoint on postrider.secrets (endpoint_id, id desc);
create index secrets_xid on postrider.secrets (xid);

create function postrider.stamp_xid() returns trigger language plpgsql as $$
begin
    new.xid := pg_current_xact_id();
    return new;
end $$;
create trigger endpoints_stamp before update on postrider.endpoints
    for each row execute function postrider.stamp_xid();
create trigger secrets_stamp before update on postrider.secrets
    for each row execute function postrider.stamp_xid();

-- Events are partitioned by their id, which begins with the time: a day's partition is a range of ids.
create table postrider.events (
    id           uuid not null,
    tenant_id    int not null,
    type_id      int not null,
    schema_id    int not null,
    chosen_id    text,                    -- the producer's own id; null when it was made from `id`
    ordering_key text,
    sequence     bigint,
    body         bytea not null,          -- the very bytes every attempt sends
    full_data    bytea,                   -- the data as it was given, of a thin event; null: it is in the body
    primary key (id)
) partition by range (id);
alter table postrider.events alter column body set storage external;
alter table postrider.events alter column full_data set storage external;
create index events_tenant on postrider.events (tenant_id, id);

-- Only ids that producers chose. Not partitioned, so that a chosen id stays unique across days.
create table postrider.event_ids (
    tenant_id   int not null,
    id          text not null,
    event_id    uuid not null,
    fingerprint bytea not null,           -- of the arguments as they were given
    primary key (tenant_id, id)
);

create table postrider.ordering_keys (
    id        bigint generated always as identity primary key,
    tenant_id int not null,
    key       text not null,
    sequence  bigint not null,
    unique (tenant_id, key)
) with (fillfactor = 70);

-- A delivery is in exactly one place: here, in `retries`, or in one attempt with `final` set.
-- No foreign keys from here on: one to a hot endpoint cost a third of the emits and made a delete wait for producers.
create table postrider.queue (
    endpoint_id int not null,
    event_id    uuid not null,
    shard       smallint not null,
    tenant_id   int not null,
    type_id     int not null,
    key_id      bigint,                   -- only with an ordering key
    sequence    bigint,
    replay_id   text,                     -- goes out as Webhook-Replay
    attempt     smallint not null default 0,  -- the number of the latest attempt made
    xid         xid8 not null default pg_current_xact_id(),
    primary key (endpoint_id, event_id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- The tail: xid first, shard is a filter. No index that could serve `order by … limit` under an equality on the
-- endpoint may stand beside the primary key: the planner would walk it.
create index queue_tail on postrider.queue (xid, endpoint_id, event_id);
create index queue_keys on postrider.queue (endpoint_id, key_id, sequence) where key_id is not null;

-- Deliveries that wait for a time. Apart from `queue`, so that a refill never walks over them.
create table postrider.retries (
    endpoint_id int not null,
    event_id    uuid not null,
    tenant_id   int not null,
    type_id     int not null,
    key_id      bigint,
    sequence    bigint,
    replay_id   text,
    attempt     smallint not null,
    step        smallint not null,        -- position in the schedule of the attempt that is waited for
    due_at      timestamptz not null,
    primary key (endpoint_id, event_id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
create index retries_due on postrider.retries (endpoint_id, due_at);
create index retries_keys on postrider.retries (endpoint_id, key_id, sequence) where key_id is not null;

-- A row stands here while an endpoint fails: since its first failure, until its next success. A new owner starts from it.
create table postrider.endpoint_health (
    endpoint_id   int primary key,
    failing_since timestamptz not null default clock_timestamp()
);

-- Append-only. A delivery's attempts lie in the partition of its event and expire with it.
create table postrider.attempts (
    event_id      uuid not null,
    endpoint_id   int not null,
    number        smallint not null,
    tenant_id     int not null,
    type_id       int not null,
    started_at    timestamptz not null,   -- `t` of the signature is this, in whole seconds
    duration_ms   int not null,
    outcome       smallint not null,      -- proto::OutcomeKind
    status        smallint,
    error         text,
    signature     text,                   -- the header as it was sent; null when nothing was sent
    response_head text,
    response_body bytea,
    replay_id     text,
    final         postrider.final_state,
    primary key (event_id, endpoint_id, number)
) partition by range (event_id);
create index attempts_final on postrider.attempts (tenant_id, event_id, endpoint_id) where final is not null;
create index attempts_endpoint_final on postrider.attempts (endpoint_id, event_id) where final is not null;

create table postrider.dead_letters (
    endpoint_id int not null,
    event_id    uuid not null,
    tenant_id   int not null,
    type_id     int not null,
    reason      postrider.dead_reason not null,
    attempt     smallint not null,
    died_at     timestamptz not null default clock_timestamp(),
    primary key (endpoint_id, event_id)
);
create index dead_letters_tenant on postrider.dead_letters (tenant_id, event_id, endpoint_id);

-- Kept by the statements that add and remove dead letters, so that counting them scans nothing.
create table postrider.dead_letter_counts (
    endpoint_id int not null,
    type_id     int not null,
    reason      postrider.dead_reason not null,
    tenant_id   int not null,
    count       bigint not null,
    primary key (endpoint_id, type_id, reason)
) with (fillfactor = 70);
create index dead_letter_counts_tenant on postrider.dead_letter_counts (tenant_id);

create table postrider.dispatchers (
    id         uuid primary key,
    name       text not null,
    started_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    -- The snapshot of settings this dispatcher has applied: what a `delete` waits for.
    applied    pg_snapshot
) with (fillfactor = 50);

create table postrider.shards (
    shard smallint primary key,
    owner uuid,
    epoch bigint not null default 0
) with (fillfactor = 50);
insert into postrider.shards (shard) select generate_series(0, 63);

create table postrider.api_keys (
    id         int generated always as identity primary key,
    public_id  text not null unique,
    hash       bytea not null unique,     -- sha-256 of the key; the key itself is shown once and kept nowhere
    role       postrider.key_role not null,
    tenant_id  int references postrider.tenants,
    name       text not null,
    created_at timestamptz not null default clock_timestamp(),
    revoked_at timestamptz,
    check ((role = 'tenant') = (tenant_id is not null))
);

create table postrider.people (
    id            int generated always as identity primary key,
    login         text not null unique,
    password_hash text not null,
    created_at    timestamptz not null default clock_timestamp()
);

create table postrider.sessions (
    token_hash bytea primary key,
    person_id  int not null references postrider.people,
    csrf       bytea not null,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
);

create table postrider.audit (
    id        bigint generated always as identity primary key,
    at        timestamptz not null default clock_timestamp(),
    actor     text not null,
    action    text not null,
    tenant_id int,
    subject   text not null,
    detail    jsonb
);
create index audit_tenant on postrider.audit (tenant_id, id);
