-- $1 the id as text, $2 the id as a number if it can be a generated one, $3 tenants that are probed.
with t as materialized (
   select id from postrider.tenants where deleted_at is null limit $3
)
select e.event_id as id, e.tenant_id from t join postrider.event_ids e on e.tenant_id = t.id and e.id = $1
union
select e.id, e.tenant_id from t cross join lateral (
   select e.id, e.tenant_id from postrider.events e where e.tenant_id = t.id and e.id = $2 limit 1
) e
union
select id, tenant_id from postrider.archived_events where id = $2
