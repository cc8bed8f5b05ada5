-- Tenants of this cell with events that wait beside the tail. One index lookup for each tenant that has any.
-- $1 the cell, $2 the last tenant read, $3 limit.
with recursive waiting (tenant_id) as (
    (select o.tenant_id from postrider.cell_outbox o where o.cell_id is null and o.tenant_id > $2 order by o.tenant_id limit 1)
    union all
    select (select o.tenant_id from postrider.cell_outbox o
            where o.cell_id is null and o.tenant_id > w.tenant_id order by o.tenant_id limit 1)
    from waiting w where w.tenant_id is not null
)
select t.id from waiting w
cross join lateral (
    select t.id from postrider.tenants t
    where t.id = w.tenant_id and t.cell_id = $1 and (not t.moving or t.deleted_at is not null) offset 0
) t
limit $3
