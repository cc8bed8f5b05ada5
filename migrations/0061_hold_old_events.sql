-- Retention: what is still needed of a day outlives its partition here. An event is held while a delivery of it waits or is
-- a dead letter; attempts made after its day was dropped are held with it.
create table postrider.events_held (
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
alter table postrider.events_held alter column body set storage external;
alter table postrider.events_held alter column full_data set storage external;
create index events_held_tenant on postrider.events_held (tenant_id, id);

create table postrider.attempts_held (like postrider.attempts including defaults);
alter table postrider.attempts_held add primary key (event_id, endpoint_id, number);

-- Ids that producers chose are forgotten with their events. They come in the order of time, so that this index is small
-- and costs an emit next to nothing.
create index event_ids_age on postrider.event_ids using brin (event_id) with (pages_per_range = 32, autosummarize = on);

-- At most the platform's own.
alter table postrider.tenants add column retention_days smallint check (retention_days between 1 and 3650);
