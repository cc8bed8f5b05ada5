-- Which dispatcher owns which shard of the endpoints.

create table postrider.dispatchers (
    id         uuid primary key,
    name       text not null,
    started_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    -- The snapshot of settings that this dispatcher has applied; deletes wait for it.
    applied    pg_snapshot,
    -- A stopping dispatcher keeps its in-flight attempts but claims no share: the others take over what it releases at once.
    leaving    boolean not null default false
) with (fillfactor = 50);

create table postrider.shards (
    shard smallint primary key,
    owner uuid,
    epoch bigint not null default 0
) with (fillfactor = 50);
insert into postrider.shards (shard) select generate_series(0, 63);
