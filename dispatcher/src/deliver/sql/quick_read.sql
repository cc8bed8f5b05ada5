-- The snapshot and everything that became visible since an earlier one, in one statement, which sees one snapshot.
-- $1..$3 a key below each transaction that ran then, and below all that had not begun; $4 the end of each range, $5 shards,
-- $6 limit. A transaction that still runs may have inserted a million rows, which are not scanned each time.
-- The bodies of events between the ids $7 and $8 come along, up to $9 bytes each: the bounds prune partitions of other days.
select pg_current_snapshot()::text as snapshot, pg_is_in_recovery() as in_recovery, pg_backend_pid() as backend,
       clock_timestamp() as now,
       exists (select from unnest($1::xid8[], $4::xid8[]) as r(low, high)
               join postrider.endpoints e on e.xid >= r.low and e.xid < r.high)
       or exists (select from unnest($1::xid8[], $4::xid8[]) as r(low, high)
                  join postrider.secrets s on s.xid >= r.low and s.xid < r.high)
       or exists (select from unnest($1::xid8[], $4::xid8[]) as r(low, high)
                  join postrider.sending w on w.xid >= r.low and w.xid < r.high) as has_changed_settings,
       q.*, e.chosen_id, e.body, e.full_data
from (values (1)) one
left join lateral (
    select q.* from unnest($1::xid8[], $2::int[], $3::uuid[], $4::xid8[]) as r(xid, endpoint_id, event_id, high)
    cross join lateral ( -- as in tail_page.sql
        select q.xid::text as xid, endpoint_id, event_id, shard, tenant_id, type_id, key_id, attempt, replay_id
        from postrider.queue q
        where (q.xid, endpoint_id, event_id) > (r.xid, r.endpoint_id, r.event_id) and q.xid < r.high
          and shard = any($5) and shard >= 0
        order by q.xid, endpoint_id, event_id limit $6
    ) q
    where r.high = '18446744073709551615' or r.xid <> all (array(select pg_snapshot_xip(pg_current_snapshot())))
    limit $6
) q on true
left join lateral (
    select e.chosen_id, e.body, e.full_data from postrider.events e
    where e.tenant_id = q.tenant_id and e.id = q.event_id and e.id >= $7 and e.id <= $8
      and octet_length(e.body) + coalesce(octet_length(e.full_data), 0) <= $9
    limit 1
) e on true
