-- Dispatchers that may still have attempts of the tenant in flight or unrecorded. An owner confirms with the first shards it
-- acquires: one that has confirmed nothing yet is waited for.
select distinct d.id, d.expires_at, d.expires_at <= clock_timestamp() as expired
from postrider.endpoints e
join postrider.shards s on s.shard = e.shard
join postrider.dispatchers d on d.id = s.owner
where e.tenant_id = $1 and not coalesce(pg_visible_in_snapshot(e.xid, d.quiet), false)
