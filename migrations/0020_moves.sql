-- Tenants that move from one cell to another. At home.

create type postrider.move_state as enum ('stopping', 'copying', 'switching', 'erasing', 'cancelling', 'done', 'cancelled');

create table postrider.tenant_moves (
    id           bigint generated always as identity primary key,
    public_id    text not null unique,
    tenant_id    int not null references postrider.tenants,
    source       smallint not null references postrider.cells,
    target       smallint not null references postrider.cells,
    state        postrider.move_state not null default 'stopping',
    -- What the move waits for, or why its last step failed, in words. Null: it makes progress.
    waits_for    text,
    -- At the source: every transaction that may have emitted for the tenant before the move has an id below this one.
    barrier      xid8,
    -- The same at home, where they may have emitted into the outbox.
    home_barrier xid8,
    -- How far the copy is: a table, and the last row of it.
    part         smallint not null default 0,
    after        text,
    copied       bigint not null default 0,       -- rows
    asked_by     text not null,
    created_at   timestamptz not null default clock_timestamp(),
    cancelled_by text,
    switched_at  timestamptz,                     -- the target accepts events and sends from then on
    ended_at     timestamptz,
    constraint tenant_moves_elsewhere check (source <> target)
);
create unique index tenant_moves_running on postrider.tenant_moves (tenant_id) where ended_at is null;
create index tenant_moves_tenant on postrider.tenant_moves (tenant_id, id);

-- The latest of the applied snapshots after which no attempt of an endpoint that it pauses was in flight or unrecorded any more.
alter table postrider.dispatchers add column quiet pg_snapshot;
