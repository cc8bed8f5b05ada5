-- The outbox in a producer's own database. `emit` (functions/emit.sql) fills it, the relay of the dispatchers empties it.

create table postrider.outbox (
    n            bigint generated always as identity primary key,
    tenant       text not null,
    type         text not null,
    data         text not null,
    id           text not null,
    version      text,
    ordering_key text,
    created_at   timestamptz not null default clock_timestamp(),
    unique (tenant, id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- Events that the main database refused.
create table postrider.outbox_refused (
    n            bigint primary key,
    tenant       text not null,
    type         text not null,
    data         text not null,
    id           text not null,
    version      text,
    ordering_key text,
    created_at   timestamptz not null,
    refusal      text not null,           -- PR404, PR409 or PR422
    message      text not null,
    refused_at   timestamptz not null default clock_timestamp()
);
