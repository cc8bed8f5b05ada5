-- Records deliveries that succeeded with their first attempt. The short form of record_batch.sql: a delivery that was
-- never attempted is in queue.
-- $1 owner; $2..$11 one array per column of `result`; $12 outcome. Returns the positions of the rows that matched.
--
-- `= any (array[…])` can be used to look up a row but not for a merge join. Given a plain equality on a queue that was empty
-- when it was last analyzed, the planner merged, and scanned the whole index once for each result.
with owned as materialized (
    select s.shard, s.epoch from postrider.shards s
    where s.owner = $1 and s.shard = any($4::smallint[])
    order by s.shard for share
),
result as materialized (
    select i.* from unnest($2::int[], $3::uuid[], $4::bigint[], $5::bigint[], $6::timestamptz[], $7::int[],
                           $8::smallint[], $9::text[], $10::text[], $11::bytea[])
        with ordinality as i(endpoint_id, event_id, shard, epoch, started_at, duration_ms, status, signature, head,
                             body, position)
    where i.shard << 48 | i.epoch = any (array(select o.shard::bigint << 48 | o.epoch from owned o))
),
taken as (
    delete from postrider.queue q using result r
    where q.endpoint_id = any (array[r.endpoint_id]) and q.event_id = r.event_id and q.attempt = 0
    returning r.*, q.tenant_id, q.type_id, q.replay_id
),
attempt as (
    insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                                    outcome, status, signature, response_head, response_body, replay_id, final)
    select event_id, endpoint_id, 1, tenant_id, type_id, started_at, duration_ms,
           $12::smallint, status, signature, head, body, replay_id, 'delivered'
    from taken
),
recovered as (
    delete from postrider.endpoint_health h
    where h.endpoint_id = any (array(select distinct t.endpoint_id from taken t))
)
select coalesce(array_agg(position::int - 1), '{}') from taken
