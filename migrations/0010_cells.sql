-- Cells: Postriders on databases of their own, each with a set of tenants. The home database has the directory: which cells there
-- are, and which one each tenant lives in. An installation with one database is home without other cells.

create table postrider.cells (
    id         smallint primary key check (id between 0 and 63),
    name       text not null unique check (name ~ '^[a-z0-9][a-z0-9-]{0,31}$'),
    -- Encrypted. Null: home, and in the copies that cells have of this table.
    url        bytea,
    -- A draining cell gets no new tenants.
    state      text not null default 'open' check (state in ('open', 'draining')),
    created_at timestamptz not null default clock_timestamp()
);
insert into postrider.cells (id, name) values (0, 'home');

-- Which cell this database is. There is one row.
create table postrider.this_cell (
    id smallint not null default 0 check (id between 0 and 63)
);
create unique index this_cell_single on postrider.this_cell ((true));
insert into postrider.this_cell default values;

alter table postrider.tenants
    add column cell_id smallint not null default 0 check (cell_id between 0 and 63),
    -- On its way to another cell: no cell accepts its events, they wait at home.
    add column moving  boolean not null default false,
    -- Whether this database accepts the tenant's events: `cell_id` is this cell, and the tenant is not moving. Kept by a trigger,
    -- so that `emit` finds it in the row that it reads anyway.
    add column is_here boolean not null default true;
create index tenants_by_cell on postrider.tenants (cell_id, id) where cell_id <> 0 and deleted_at is null;
create index tenants_moving on postrider.tenants (id) where moving;

-- At home: events of tenants that live in other cells, until the cell's relay has taken them. Each cell's relay reads what became
-- visible since it last looked, like the readers of `queue`.
create sequence postrider.cell_outbox_n;
create table postrider.cell_outbox (
    -- In the order of commits among the events of one key.
    n            bigint primary key default nextval('postrider.cell_outbox_n'),
    tenant_id    int not null,
    -- The cell whose relay takes the event as it becomes visible. Null: it waits, because the tenant was moving when it was
    -- emitted, or because the cell does not accept it yet. The relay of the tenant's cell looks for those, in order of `n`.
    cell_id      smallint,
    xid          xid8 not null default pg_current_xact_id(),
    type         text not null,
    data         text not null,
    id           text not null,           -- fixed here: relaying an event twice has no effect
    is_chosen    boolean not null,        -- by the producer
    version      text,
    ordering_key text,
    context      bytea,                   -- trace context, as in `traces`
    created_at   timestamptz not null default clock_timestamp()
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
alter sequence postrider.cell_outbox_n owned by postrider.cell_outbox.n;
alter table postrider.cell_outbox alter column data set storage external;
create index cell_outbox_tail on postrider.cell_outbox (cell_id, xid, n) where cell_id is not null;
create index cell_outbox_waiting on postrider.cell_outbox (tenant_id, n) where cell_id is null;
-- An id that a producer repeats is compared here. Once the event was relayed, its cell compares it.
create unique index cell_outbox_ids on postrider.cell_outbox (tenant_id, id) where is_chosen;

-- Whether an event of a key is still here: one that is emitted in the cell itself would overtake it.
create index cell_outbox_keyed on postrider.cell_outbox (tenant_id, ordering_key) where ordering_key is not null;

-- Held until the producer's commit, so that the events of a key are numbered in the order of their commits.
create table postrider.cell_outbox_keys (
    tenant_id int not null,
    key       text not null,
    primary key (tenant_id, key)
);

-- Events that the tenant's cell has refused for good.
create table postrider.cell_outbox_refused (
    n            bigint primary key,
    tenant_id    int not null,
    cell_id      smallint not null,
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
create index cell_outbox_refused_age on postrider.cell_outbox_refused (refused_at);

-- Tenants whose cell refuses events because of a quota: until then `emit` at home refuses them too, so that they don't pile up here.
create table postrider.cell_quotas_used (
    tenant_id int primary key,
    refusal   text not null check (refusal in ('PR429', 'PR507')),
    until     timestamptz not null
);
