-- Endpoints, their signing secrets, and what is tracked per endpoint besides deliveries.

create type postrider.endpoint_state as enum ('active', 'paused', 'disabled', 'deleted');
create type postrider.signature_format as enum ('t-v1', 'standard', 'standard-ed25519');

create table postrider.endpoints (
    id              int generated always as identity primary key,
    public_id       text not null unique,
    tenant_id       int not null references postrider.tenants,
    shard           smallint not null check (shard between 0 and 63),
    url             text not null check (octet_length(url) <= 2048),
    description     text check (octet_length(description) <= 1024),
    types           text[] not null default '{*}' check (cardinality(types) between 1 and 100),
    versions        jsonb,               -- {type: version}: of this type only this version
    filter          json,
    concurrency     smallint check (concurrency between 1 and 1024),           -- null: the global setting
    rate_per_second int check (rate_per_second between 1 and 100000),
    ordered         boolean not null default false,
    retry_schedule  int[] check (cardinality(retry_schedule) between 1 and 50), -- delays in ms; null: the global setting
    timeout_ms      int check (timeout_ms between 100 and 60000),              -- null: the global setting
    signature       postrider.signature_format not null default 't-v1',
    headers         bytea,               -- encrypted: custom headers often contain a token
    state           postrider.endpoint_state not null default 'active',
    state_reason    text,
    created_at      timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp(),
    -- The transaction that last changed the row. Dispatchers find changed settings by it, as they find new queue rows.
    xid             xid8 not null default pg_current_xact_id(),
    -- Rotation interval of the secret. Null: the tenant's default. 0: never.
    rotate_every_days smallint check (rotate_every_days = 0 or rotate_every_days between 7 and 730),
    tls             bytea                -- CA certificates, client certificate and key, encrypted as one value
);
create index endpoints_tenant on postrider.endpoints (tenant_id, id) where state <> 'deleted';
create index endpoints_shard on postrider.endpoints (shard, id);
create index endpoints_xid on postrider.endpoints (xid);
-- A dispatcher that takes over shards looks for work of each of their endpoints. Rows of deleted endpoints are kept for
-- good and must not cost anything there. Recently deleted endpoints may still get queue rows from slow producers, which
-- have to be dropped.
create index endpoints_live on postrider.endpoints (id) where state <> 'deleted';
create index endpoints_deleted on postrider.endpoints (updated_at) where state = 'deleted';

-- Signing secrets, encrypted with the master key and bound to the endpoint.
create table postrider.secrets (
    id          int generated always as identity primary key,
    endpoint_id int not null references postrider.endpoints,
    ciphertext  bytea not null,
    created_at  timestamptz not null default clock_timestamp(),
    retires_at  timestamptz,             -- null: current
    xid         xid8 not null default pg_current_xact_id(),
    -- The public half of an ed25519 key pair, whose private half is in `ciphertext`. Shown without decrypting anything.
    public_key  text
);
create index secrets_endpoint on postrider.secrets (endpoint_id, id desc);
create index secrets_xid on postrider.secrets (xid);
-- An endpoint has one current secret.
create unique index secrets_current on postrider.secrets (endpoint_id) where retires_at is null;

-- Announced rotations. A row belongs to the secret that will be replaced and is void once that secret was replaced manually.
create table postrider.planned_rotations (
    secret_id    int primary key references postrider.secrets,
    endpoint_id  int not null,
    announced_at timestamptz not null default clock_timestamp(),
    rotates_at   timestamptz not null
);
create index planned_rotations_due on postrider.planned_rotations (rotates_at);
create index planned_rotations_endpoint on postrider.planned_rotations (endpoint_id);

-- Endpoints that are failing: a row exists from the first failure until the next success. A new owner starts from it.
create table postrider.endpoint_health (
    endpoint_id    int primary key,
    failing_since  timestamptz not null default clock_timestamp(),
    disabled       boolean not null default false,
    -- An endpoint is disabled only if it failed on several days (UTC) without a long break between them.
    failed_days    smallint not null default 1,
    last_failed_on date not null default (clock_timestamp() at time zone 'UTC')::date
);

-- Endpoints to be disabled because of a response or days of failures. Written together with the result that caused it;
-- a dispatcher disables them soon after.
create table postrider.endpoints_to_disable (
    endpoint_id int primary key,
    cause       text not null check (cause in ('gone', 'failing')),
    noted_at    timestamptz not null default clock_timestamp()
);

-- One operational event is emitted when an endpoint's dead letters reach the threshold, the next one only after they have
-- dropped below it.
create table postrider.alerts (
    endpoint_id  int primary key,
    dead_letters bigint not null check (dead_letters between 1 and 1000000000),
    passed_at    timestamptz,
    asked_by     text not null,
    created_at   timestamptz not null default clock_timestamp()
);

-- Recent test events and probes per endpoint: the limit on them holds across all processes.
create table postrider.trials (
    endpoint_id int         not null,
    kind        text        not null check (kind in ('test', 'probe')),
    since       timestamptz not null,
    used        int         not null,
    -- When a probe last found a receiver that verifies signatures correctly. Shown in the checklist of a new installation.
    passed_at   timestamptz,
    primary key (endpoint_id, kind)
);
create index trials_passed on postrider.trials (endpoint_id) where passed_at is not null;

-- Temporary endpoints whose requests are read over a connection to the API. The endpoint is paused: emits queue for it, no
-- dispatcher sends, and the client that holds the connection takes the queue rows. It expires when nobody has been
-- connected for a while.
create table postrider.listeners (
    endpoint_id int         primary key,
    holder      uuid,
    expires_at  timestamptz not null
);
create index listeners_expiry on postrider.listeners (expires_at);
