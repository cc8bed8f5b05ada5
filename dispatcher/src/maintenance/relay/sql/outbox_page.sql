-- Events by their numbers, with what the directory says of their tenants now. While events of a tenant wait beside the tail, its
-- others have to wait behind them. `offset 0` and `limit 1` leave one index scan for each event, also of a table that was empty at
-- the last vacuum: a join would scan all of it.
-- $1 numbers, $2 the cell.
select o.n, o.tenant_id, t.slug as tenant, t.deleted_at is not null as is_deleted,
       t.cell_id = $2 and not t.moving as is_ours, o.cell_id is not null and w.tenant_id is not null as must_wait,
       extract(epoch from clock_timestamp() - o.created_at)::float8 as age_seconds,
       o.type, o.data, o.id, o.version, o.ordering_key, o.context
from unnest($1::bigint[]) as u (n)
cross join lateral (select * from postrider.cell_outbox o where o.n = u.n offset 0) o
cross join lateral (select * from postrider.tenants t where t.id = o.tenant_id offset 0) t
left join lateral (
    select w.tenant_id from postrider.cell_outbox w where w.tenant_id = o.tenant_id and w.cell_id is null limit 1
) w on true
order by o.n
