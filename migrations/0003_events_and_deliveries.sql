-- Events and their deliveries.
-- A delivery is in exactly one place: `queue`, `retries`, or one attempt with `final` set. A dead one also has a row in
-- `dead_letters`. Hot tables have no foreign keys: one to a busy endpoint cost a third of the emit throughput and made
-- deletes wait for producers.

-- A discarded delivery was dead, and someone decided that it need not be delivered.
create type postrider.final_state as enum ('delivered', 'dead', 'discarded');
create type postrider.dead_reason as enum ('exhausted', 'gone', 'endpoint_disabled', 'too_old', 'refused_address');
-- Where a bulk replay finds the deliveries it queues.
create type postrider.replay_source as enum ('dead', 'delivered', 'retrying', 'missing');

-- Partitioned by id. Ids start with the time, so that a partition is a range of both; `partitions.rs` creates them.
-- One index serves the lookup of a body and a tenant's list, so that every statement that looks up an event needs its tenant.
create table postrider.events (
    id           uuid not null,
    tenant_id    int not null,
    type_id      int not null,
    schema_id    int not null,
    chosen_id    text,                    -- the producer's own id; null: derived from `id`
    ordering_key text,
    sequence     bigint,
    body         bytea not null,          -- the bytes that every attempt sends
    full_data    bytea,                   -- the data of a thin event as it was emitted; null: it is in the body
    primary key (tenant_id, id)
) partition by range (id);
alter table postrider.events alter column body set storage external;
alter table postrider.events alter column full_data set storage external;

-- Events that outlive their partition, because a delivery of them is pending or dead.
create table postrider.archived_events (
    id           uuid primary key,
    tenant_id    int not null,
    type_id      int not null,
    schema_id    int not null,
    chosen_id    text,
    ordering_key text,
    sequence     bigint,
    body         bytea not null,
    full_data    bytea
);
alter table postrider.archived_events alter column body set storage external;
alter table postrider.archived_events alter column full_data set storage external;
create index archived_events_tenant on postrider.archived_events (tenant_id, id);

-- Ids chosen by producers. Not partitioned, so that an id is unique across partitions. Deleted with their events.
create table postrider.event_ids (
    tenant_id   int not null,
    id          text not null,
    event_id    uuid not null,
    fingerprint bytea not null,           -- of the arguments of the emit: half of a sha-256
    primary key (tenant_id, id)
);
-- Rows arrive in the order of time, so that this index is small and adds next to nothing to an emit.
create index event_ids_age on postrider.event_ids using brin (event_id) with (pages_per_range = 32, autosummarize = on);

create table postrider.ordering_keys (
    id        bigint generated always as identity,      -- never looked up, so that it needs no index
    tenant_id int not null,
    key       text not null,
    sequence  bigint not null,
    primary key (tenant_id, key)
) with (fillfactor = 70);

-- The trace context an event was emitted with. Only events that came with one have a row, so that others pay nothing.
-- Separate from `events` because it is deleted after days.
create table postrider.traces (
    event_id uuid primary key,
    -- 25 bytes of trace id, span id and flags, followed by the tracestate.
    context  bytea not null check (octet_length(context) between 25 and 25 + 512)
);

-- What became of one event of an emit.
create type postrider.emission as (
    "position" int,          -- in the arrays of `emit_all`, from 0
    event_id   uuid,
    id         text,
    created_at timestamptz,
    duplicate  boolean,      -- the same id with the same content existed: the other columns describe that event
    refusal    text,         -- null, or an SQLSTATE. PR000: the data was validated against another schema
    field      text,
    message    text,
    version    text,
    sequence   bigint
);

create table postrider.queue (
    endpoint_id int not null,
    event_id    uuid not null,
    shard       smallint not null,
    tenant_id   int not null,
    type_id     int not null,
    key_id      bigint,                   -- only with an ordering key
    sequence    bigint,
    replay_id   text,                     -- sent as Webhook-Replay
    attempt     smallint not null default 0,  -- number of the latest attempt
    xid         xid8 not null default pg_current_xact_id(),
    -- What the delivery was before a bulk replay queued it; a cancelled replay restores it. Null for all other
    -- deliveries, so that ordinary rows stay small.
    was_source  postrider.replay_source,
    was_reason  postrider.dead_reason,
    was_failure smallint,
    was_at      timestamptz,              -- time of death, or the time it was due
    was_step    smallint,
    was_replay  text,
    primary key (endpoint_id, event_id),
    constraint queue_attempt check (attempt >= 0),
    constraint queue_ordered check ((key_id is null) = (sequence is null)),
    constraint queue_replayed check (was_source is null or replay_id is not null)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- Readers find new rows by xid; the shard is a filter. Its predicate is true of every row. After a vacuum of an empty table
-- the planner believes that all indexes cost the same; it can use this one only for statements that repeat the predicate,
-- so that it never scans the whole index to look up one delivery. For the same reason no index that could serve
-- `order by … limit` for one endpoint may exist beside the primary key.
create index queue_xid on postrider.queue (xid, endpoint_id, event_id) where shard >= 0;
create index queue_keys on postrider.queue (endpoint_id, key_id, sequence) where key_id is not null;
-- Replays count their deliveries by these; ordinary deliveries are in none of them.
create index queue_replays on postrider.queue (endpoint_id, replay_id) where replay_id is not null;

-- Deliveries that wait for their next attempt. Separate from `queue`, so that a refill never scans them.
create table postrider.retries (
    endpoint_id int not null,
    event_id    uuid not null,
    tenant_id   int not null,
    type_id     int not null,
    key_id      bigint,
    sequence    bigint,
    replay_id   text,
    attempt     smallint not null,
    step        smallint not null,        -- position of the next attempt in the retry schedule
    due_at      timestamptz not null,
    primary key (endpoint_id, event_id),
    constraint retries_attempt check (attempt >= 1 and step >= 0),
    constraint retries_ordered check ((key_id is null) = (sequence is null))
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- The predicate is true of every row, as that of `queue_xid`.
create index retries_next on postrider.retries (endpoint_id, due_at) where attempt >= 0;
create index retries_keys on postrider.retries (endpoint_id, key_id, sequence) where key_id is not null;
create index retries_replays on postrider.retries (endpoint_id, replay_id) where replay_id is not null;

-- Append-only. The attempts of a delivery are in the partition of its event's time and expire with it.
-- A tenant's ended deliveries are found by its events: an index of their own would be a third one for every attempt.
create table postrider.attempts (
    event_id      uuid not null,
    endpoint_id   int not null,
    number        smallint not null,
    tenant_id     int not null,
    type_id       int not null,
    started_at    timestamptz not null,   -- in whole seconds: `t` of the signature
    duration_ms   int not null,
    outcome       smallint not null,      -- proto::OutcomeKind
    status        smallint,
    error         text,
    signature     text,                   -- the header as it was sent; null: nothing was sent
    response_head text,
    response_body bytea,
    replay_id     text,
    final         postrider.final_state,
    timing        text,                   -- of a failed attempt: proto::Timing
    primary key (event_id, endpoint_id, number)
) partition by range (event_id);
create index attempts_endpoint_final on postrider.attempts (endpoint_id, event_id) where final is not null;
-- Receivers that reject our signatures: few rows.
create index attempts_unauthorized on postrider.attempts (endpoint_id, started_at) where status in (401, 403);
-- Lists filtered by status code. Failures are few, and successful attempts pay nothing for it. Codes of successful attempts
-- need no index: nearly every row has one.
create index attempts_refused on postrider.attempts (status, event_id, endpoint_id, number)
    where status < 200 or status > 299;

-- Deliveries of a replay. Ordinary attempts are not in it.
create index attempts_replays on postrider.attempts (replay_id, event_id, endpoint_id) where replay_id is not null;

-- Attempts made after the partition of their event was dropped.
create table postrider.archived_attempts (
    like postrider.attempts including defaults,
    primary key (event_id, endpoint_id, number)
);

create index archived_attempts_replays on postrider.archived_attempts (replay_id, event_id, endpoint_id)
    where replay_id is not null;

create table postrider.dead_letters (
    endpoint_id int not null,
    event_id    uuid not null,
    tenant_id   int not null,
    type_id     int not null,
    reason      postrider.dead_reason not null,
    failure     smallint not null,        -- of the last attempt: proto::Failure
    attempt     smallint not null,
    died_at     timestamptz not null default clock_timestamp(),
    replay_id   text,
    primary key (endpoint_id, event_id),
    constraint dead_letters_attempt check (attempt >= 1)
);
create index dead_letters_tenant on postrider.dead_letters (tenant_id, event_id, endpoint_id);
create index dead_letters_replays on postrider.dead_letters (endpoint_id, replay_id) where replay_id is not null;
-- The dead letters of all tenants, newest first.
create index dead_letters_newest on postrider.dead_letters (event_id, endpoint_id);

-- Maintained by the statements that add and remove dead letters, so that counting scans nothing.
create table postrider.dead_letter_counts (
    endpoint_id int not null,
    type_id     int not null,
    reason      postrider.dead_reason not null,
    failure     smallint not null,
    tenant_id   int not null,
    count       bigint not null,
    primary key (endpoint_id, type_id, reason, failure)
) with (fillfactor = 70);
create index dead_letter_counts_tenant on postrider.dead_letter_counts (tenant_id);

-- Pending operational events about dead letters and recovered endpoints. Written by the statement that caused them, emitted
-- by a dispatcher soon after.
create table postrider.notices (
    id          bigint generated always as identity primary key,
    endpoint_id int not null,
    event_id    uuid,                     -- of the dead letter; null: the endpoint has recovered
    reason      postrider.dead_reason,
    attempt     smallint,
    since       timestamptz
);
