-- The next tenants of cells that are drained, each with the cell it goes to; so many that no cell has more than $1 on the way.
with target as (
    select c.name from postrider.cells c
    where c.state = 'open'
    order by (select count(*) from postrider.tenants t where t.cell_id = c.id and t.deleted_at is null), c.id limit 1
)
select t.id, target.name
from postrider.cells c
cross join target
cross join lateral (
    select t.id from postrider.tenants t
    where t.cell_id = c.id and t.deleted_at is null and not t.moving
      and not exists (select from postrider.tenant_moves m where m.tenant_id = t.id and m.ended_at is null)
    order by t.id
    limit greatest($1 - (select count(*) from postrider.tenant_moves m where m.source = c.id and m.ended_at is null), 0)
) t
where c.state = 'draining' and exists (select from postrider.this_cell h where h.id = 0)
