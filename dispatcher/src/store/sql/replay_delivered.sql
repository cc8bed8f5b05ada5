-- Queues up to $9 delivered deliveries of one endpoint again. The update of `final` is the guard.
-- $1 endpoint, $2 after this event, $3 from this event, $4 below this event, $5 when the replay was requested, $6 type,
-- $7 reason, $8 failure, $9 limit, $10 replay id, $11 the most attempts a delivery may have.
-- Returns how many were queued, the last event read, and whether none is left.
with e as (
    select id, shard from postrider.endpoints where id = $1
),
picked as materialized (
    select d.event_id, d.number from e cross join lateral (
        select d.event_id, d.number from postrider.attempts d
        where d.endpoint_id = e.id and d.event_id > $2 and d.event_id >= $3 and d.event_id < $4
          and ($6::int is null or d.type_id = $6)
          and d.final is not null and d.final = 'delivered' and d.started_at <= $5 and $7::text is null and $8::smallint is null
          and d.number < $11
        order by d.event_id limit $9) d
),
cleared as (
    update postrider.attempts a set final = null from picked p, e
    where a.event_id = p.event_id and a.endpoint_id = e.id and a.number = p.number and a.final = 'delivered'
    returning a.event_id, a.tenant_id, a.type_id, a.number
),
queued as (
    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, replay_id, attempt, was_source)
    select e.id, c.event_id, e.shard, c.tenant_id, c.type_id, $10, c.number, 'delivered' from cleared c, e
)
select (select count(*) from cleared) as moved,
       (select event_id from picked order by event_id desc limit 1) as last,
       (select count(*) from picked) < $9 as exhausted
