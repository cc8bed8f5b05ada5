-- Long-running work that was requested: bulk replays and the erasure of deleted tenants.

create type postrider.replay_kind as enum ('deliveries', 'missing');
create type postrider.replay_state as enum ('running', 'done', 'cancelled');

create table postrider.replays (
    id                  bigint generated always as identity primary key,
    public_id           text not null unique,
    tenant_id           int not null,
    kind                postrider.replay_kind not null,
    -- The filter as requested. Null: any.
    endpoint_id         int,
    delivery_state      text,
    type_id             int,
    reason              postrider.dead_reason,
    failure             smallint,
    since               timestamptz,
    until               timestamptz,
    rate_per_second     int not null check (rate_per_second between 1 and 100000),  -- per endpoint
    state               postrider.replay_state not null default 'running',
    asked_by            text not null,
    -- Deliveries that failed, and events that were emitted, after this are not included.
    created_at          timestamptz not null default clock_timestamp(),
    ended_at            timestamptz,
    measured_per_second real,
    -- Replays take turns: each step is due at a time, whichever process runs it. A replay that makes no progress waits
    -- longer each time.
    step_at             timestamptz not null default clock_timestamp(),
    idle_ms             int not null default 0,        -- the wait before the step that is due
    measured_at         timestamptz,
    measured_done       bigint
);
create index replays_tenant on postrider.replays (tenant_id, id);
create index replays_due on postrider.replays (step_at) where state = 'running';
create index replays_running on postrider.replays (tenant_id) where state = 'running';

-- Progress per endpoint and source, so that a paused or slow endpoint does not delay the others.
create table postrider.replay_parts (
    replay_id   bigint not null references postrider.replays on delete cascade,
    endpoint_id int not null,
    source      postrider.replay_source not null,
    total       bigint not null,
    moved       bigint not null default 0,       -- queued
    skipped     bigint not null default 0,       -- no longer there, or the endpoint no longer accepts deliveries
    after_event uuid not null default '00000000-0000-0000-0000-000000000000',
    ended       boolean not null default false,
    stepped_at  timestamptz,                     -- when its deliveries were last queued, for the rate
    withdrawn_from uuid,                         -- the first event that a cancellation withdrew: it resumes there
    primary key (replay_id, endpoint_id, source)
) with (fillfactor = 70);

-- Removal of the stored data of deleted tenants.
-- It is complete when no transaction can emit for the tenant any more. An emit has a transaction id before it reads the
-- tenant. `barrier` is the first id that was not assigned when the job started, after the deletion was committed: once
-- every transaction below it has ended, none is left that saw the tenant. A transaction that uses a single snapshot and
-- began before the deletion would see the tenant forever: its emits are rejected.
create table postrider.erasures (
    id         bigint generated always as identity primary key,
    public_id  text not null unique,
    tenant_id  int not null,
    slug       text not null,
    total      bigint not null,               -- events, counted when the erasure was requested
    done       bigint not null default 0,
    -- Producers whose transactions began before this one may still commit an event.
    xid        xid8 not null default pg_current_xact_id(),
    asked_by   text not null,
    created_at timestamptz not null default clock_timestamp(),
    ended_at   timestamptz,
    barrier    xid8,
    -- Whether `total` is complete: the request counts only up to a limit, the job counts the rest.
    counted    boolean not null default true
);
