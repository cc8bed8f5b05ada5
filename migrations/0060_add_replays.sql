-- Bulk replays: what was asked for, and how far it is. Each endpoint of one has parts of its own, so that one that is
-- paused or slow holds up nobody else's.
create type postrider.replay_kind as enum ('deliveries', 'missing');
create type postrider.replay_state as enum ('running', 'done', 'cancelled');
create type postrider.replay_source as enum ('dead', 'delivered', 'waiting', 'missing');

create table postrider.replays (
    id                  bigint generated always as identity primary key,
    public_id           text not null unique,
    tenant_id           int not null,
    kind                postrider.replay_kind not null,
    -- The filter as it was asked for. Null: any.
    endpoint_id         int,
    delivery_state      text,
    type_id             int,
    reason              postrider.dead_reason,
    since               timestamptz,
    until               timestamptz,
    rate_per_second     int not null check (rate_per_second between 1 and 100000),  -- to each endpoint
    state               postrider.replay_state not null default 'running',
    asked_by            text not null,
    -- What failed, or was emitted, after this instant is not part of it.
    created_at          timestamptz not null default clock_timestamp(),
    ended_at            timestamptz,
    measured_per_second real
);
create index replays_tenant on postrider.replays (tenant_id, id);

create table postrider.replay_parts (
    replay_id   bigint not null references postrider.replays on delete cascade,
    endpoint_id int not null,
    source      postrider.replay_source not null,
    total       bigint not null,
    moved       bigint not null default 0,       -- put in line
    skipped     bigint not null default 0,       -- were no longer there, or their endpoint no longer takes any
    after_event uuid not null default '00000000-0000-0000-0000-000000000000',
    ended       boolean not null default false,
    primary key (replay_id, endpoint_id, source)
) with (fillfactor = 70);

-- How a replay's deliveries fared is counted by these; rows of ordinary deliveries are in none of them.
alter table postrider.dead_letters add column replay_id text;
create index queue_replays on postrider.queue (endpoint_id, replay_id) where replay_id is not null;
create index retries_replays on postrider.retries (endpoint_id, replay_id) where replay_id is not null;
create index dead_letters_replays on postrider.dead_letters (endpoint_id, replay_id) where replay_id is not null;
