-- Switches that operators use while the system runs: stop all sending, pause a tenant, change the log level. And which older
-- programs may use this schema.

create table postrider.sending (
    -- There is one row.
    id         boolean primary key default true check (id),
    -- Null: requests are sent.
    stopped_at timestamptz,
    stopped_by text,
    reason     text check (octet_length(reason) <= 1024),
    -- The database that this row was last confirmed in: `database_identity()`. Another one means that this is a restored copy,
    -- which must not send. Null: unknown, because the server does not reveal it.
    identity   text,
    -- The transaction that last changed the row. Dispatchers find the change by it, as they find changed endpoints.
    xid        xid8 not null default pg_current_xact_id()
);
create index sending_xid on postrider.sending (xid);
insert into postrider.sending default values;

-- Nothing is sent to a paused tenant's endpoints; events are queued. A change stamps the tenant's endpoints.
alter table postrider.tenants
    add column paused_at    timestamptz,
    add column paused_by    text,
    add column pause_reason text check (octet_length(pause_reason) <= 1024);
create index tenants_paused on postrider.tenants (id) where paused_at is not null;

create table postrider.log_filter (
    id         boolean primary key default true check (id),
    -- Null: each process uses its own setting.
    filter     text check (octet_length(filter) <= 1024),
    changed_by text,
    changed_at timestamptz not null default clock_timestamp()
);
insert into postrider.log_filter default values;

-- One row. Programs that know only migrations before `oldest_version` can't use this schema: a later migration has dropped what
-- they need.
create table postrider.schema_compatibility (
    id             boolean primary key default true check (id),
    oldest_version bigint not null
);
insert into postrider.schema_compatibility (oldest_version) values (7);
