-- Queues up to $9 dead letters of one endpoint again. The deleted row is the guard: its attempts may be gone already.
-- $1 endpoint, $2 after this event, $3 from this event, $4 below this event, $5 when the replay was requested, $6 type,
-- $7 reason, $8 failure, $9 limit, $10 replay id, $11 the most attempts a delivery may have.
-- Returns how many were queued, the last event read, and whether none is left.
with e as (
    select id, shard from postrider.endpoints where id = $1
),
picked as materialized (
    select d.event_id from e cross join lateral (
        select d.event_id from postrider.dead_letters d
        where d.endpoint_id = e.id and d.event_id > $2 and d.event_id >= $3 and d.event_id < $4
          and ($6::int is null or d.type_id = $6)
          and d.died_at <= $5 and ($7::text is null or d.reason = $7::postrider.dead_reason)
          and ($8::smallint is null or d.failure = $8)
          and d.attempt < $11
        order by d.event_id limit $9) d
),
revived as (
    delete from postrider.dead_letters d using picked p, e
    where d.endpoint_id = e.id and d.event_id = p.event_id
    returning d.event_id, d.tenant_id, d.type_id, d.reason, d.failure, d.attempt, d.died_at, d.replay_id
),
uncounted as (
    update postrider.dead_letter_counts n set count = n.count - r.count
    from e, (select type_id, reason, failure, count(*) from revived group by type_id, reason, failure) r
    where n.endpoint_id = e.id and n.type_id = r.type_id and n.reason = r.reason and n.failure = r.failure
),
cleared as (
    update postrider.attempts a set final = null from revived r, e
    where a.event_id = r.event_id and a.endpoint_id = e.id and a.number = r.attempt
),
cleared_archived as (
    update postrider.archived_attempts a set final = null from revived r, e
    where a.event_id = r.event_id and a.endpoint_id = e.id and a.number = r.attempt
),
queued as (
    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, replay_id, attempt,
                                 was_source, was_reason, was_failure, was_at, was_replay)
    select e.id, r.event_id, e.shard, r.tenant_id, r.type_id, $10, r.attempt, 'dead', r.reason, r.failure, r.died_at,
           r.replay_id
    from revived r, e
)
select (select count(*) from revived) as moved,
       (select event_id from picked order by event_id desc limit 1) as last,
       (select count(*) from picked) < $9 as exhausted
