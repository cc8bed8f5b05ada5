-- Events by their numbers, with what the directory says of their tenants now. While events of a tenant wait beside the tail, its
-- others have to wait behind them.
-- $1 numbers, $2 the cell.
select o.n, o.tenant_id, t.slug as tenant, t.deleted_at is not null as is_deleted,
       t.cell_id = $2 and not t.moving as is_ours,
       o.cell_id is not null
           and exists (select from postrider.cell_outbox w where w.tenant_id = o.tenant_id and w.cell_id is null) as must_wait,
       extract(epoch from clock_timestamp() - o.created_at)::float8 as age_seconds,
       o.type, o.data, o.id, o.version, o.ordering_key, o.context
from unnest($1::bigint[]) as u (n)
join postrider.cell_outbox o on o.n = u.n
join postrider.tenants t on t.id = o.tenant_id
order by o.n
