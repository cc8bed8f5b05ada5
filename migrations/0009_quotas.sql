-- Quotas of tenants: how many events they may emit, and how many bytes of events are kept for them.

alter table postrider.tenants
    -- Null: unlimited. Only tenants with a quota are counted.
    add column emits_per_minute int check (emits_per_minute > 0),
    add column stored_bytes_max bigint check (stored_bytes_max > 0),
    -- Events emitted from then on are counted as they are emitted; earlier ones are measured once.
    add column usage_since      timestamptz,
    add column usage_measured   boolean not null default false;
create index tenants_counted on postrider.tenants (id) where usage_since is not null;

-- What tenants with a quota have used, by day of the event.
create table postrider.tenant_usage (
    tenant_id int not null,
    day       date not null,
    -- Transactions that are open at the same time count in rows of their own, so that none waits for another.
    slot      uuid not null default gen_random_uuid(),
    bytes     bigint not null,
    -- Emits of the latest minute in which this row was used.
    minute    timestamptz not null default 'epoch',
    emits     bigint not null default 0,
    primary key (tenant_id, day, slot)
) with (fillfactor = 50);
