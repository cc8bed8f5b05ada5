-- Queues up to $9 events that one endpoint subscribes to and never received. The queue's primary key is the guard.
-- $1 endpoint, $2 after this event, $3 from this event, $4 below this event, $5 when the replay was requested, $6 type,
-- $7 reason, $8 failure, $9 limit, $10 replay id, $11 the most events to read, however few of them match.
-- Returns how many were queued, the last event read, and whether none is left.
with e as (
    select id, shard from postrider.endpoints where id = $1
),
seen as materialized (
    select d.* from e cross join lateral (
        select v.id as event_id, v.tenant_id, v.type_id, v.schema_id from postrider.events v
        where v.tenant_id = (select n.tenant_id from postrider.endpoints n where n.id = e.id)
          and v.id > $2 and v.id >= $3 and v.id < $4
        order by v.id limit $11) d
),
picked as materialized (
    select d.event_id, d.tenant_id, d.type_id from e cross join lateral (
        select d.event_id, d.tenant_id, d.type_id from seen d
        join postrider.endpoints p on p.id = e.id
        join postrider.event_types y on y.id = d.type_id
        join postrider.schemas s on s.id = d.schema_id
        where ($6::int is null or d.type_id = $6) and $5::timestamptz is not null and $7::text is null and $8::smallint is null
          and y.matches && p.types
          and (p.versions is null or coalesce(p.versions ->> y.name, s.version) = s.version)
          and not exists (select from postrider.queue q where q.endpoint_id = e.id and q.event_id = d.event_id)
          and not exists (select from postrider.retries q where q.endpoint_id = e.id and q.event_id = d.event_id)
          and not exists (select from postrider.attempts a where a.event_id = d.event_id and a.endpoint_id = e.id)
        order by d.event_id limit $9) d
),
queued as (
    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, replay_id, was_source)
    select e.id, p.event_id, e.shard, p.tenant_id, p.type_id, $10, 'missing' from picked p, e
    on conflict do nothing
    returning event_id
)
select (select count(*) from queued) as moved,
       case when (select count(*) from picked) < $9 then (select event_id from seen order by event_id desc limit 1)
            else (select event_id from picked order by event_id desc limit 1) end as last,
       (select count(*) from picked) < $9 and (select count(*) from seen) < $11 as exhausted
