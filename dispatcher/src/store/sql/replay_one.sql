-- Queues one ended delivery again: its last attempt is no longer final, its dead letter is removed and no longer counted.
-- The queue row has no ordering key, because a replay is outside the order. A dead letter may have outlived its attempts.
-- $1 event, $2 endpoint, $3 replay id, $4 number of the last attempt.
with cleared as (
    update postrider.attempts a set final = null
    from postrider.endpoints e
    where a.event_id = $1 and a.endpoint_id = $2 and a.final is not null and a.number = $4
      and e.id = a.endpoint_id and e.state in ('active', 'paused')
    returning a.event_id, a.endpoint_id, a.tenant_id, a.type_id, a.number, e.shard
),
cleared_archived as (
    update postrider.archived_attempts a set final = null
    from postrider.endpoints e
    where a.event_id = $1 and a.endpoint_id = $2 and a.final is not null and a.number = $4
      and e.id = a.endpoint_id and e.state in ('active', 'paused')
    returning a.event_id, a.endpoint_id, a.tenant_id, a.type_id, a.number, e.shard
),
revived as (
    delete from postrider.dead_letters d using postrider.endpoints e
    where d.endpoint_id = $2 and d.event_id = $1 and d.attempt = $4
      and e.id = d.endpoint_id and e.state in ('active', 'paused')
    returning d.event_id, d.endpoint_id, d.tenant_id, d.type_id, d.attempt as number, e.shard, d.reason, d.failure
),
uncounted as (
    update postrider.dead_letter_counts n set count = n.count - 1 from revived r
    where n.endpoint_id = r.endpoint_id and n.type_id = r.type_id and n.reason = r.reason and n.failure = r.failure
)
insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, replay_id, attempt)
select endpoint_id, event_id, shard, tenant_id, type_id, $3, number from cleared
union
select endpoint_id, event_id, shard, tenant_id, type_id, $3, number from cleared_archived
union
select endpoint_id, event_id, shard, tenant_id, type_id, $3, number from revived
