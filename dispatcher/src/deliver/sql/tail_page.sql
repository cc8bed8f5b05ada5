-- One index scan per range of transactions, in their order.
-- The bounds are plain parameters: with a function of the snapshot in the query the planner scans the table, and with `= any`
-- it sorts everything. Each range has a single lower bound: given two, the index would use the wrong one and scan rows that
-- were read before.
-- $1..$3 a key below each range, or the last one read; $4 the end of each range, $5 shards, $6 limit.
select q.* from unnest($1::xid8[], $2::int[], $3::uuid[], $4::xid8[]) as r(xid, endpoint_id, event_id, high)
cross join lateral (
    select q.xid::text as xid, endpoint_id, event_id, shard, tenant_id, type_id, key_id, attempt, replay_id
    from postrider.queue q
    where (q.xid, endpoint_id, event_id) > (r.xid, r.endpoint_id, r.event_id) and q.xid < r.high
      and shard = any($5) and shard >= 0
    order by q.xid, endpoint_id, event_id limit $6
) q
limit $6
