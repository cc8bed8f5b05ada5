-- $1 text, $2 endpoints that are searched, $3 limit.
select e.id, e.public_id, t.slug as tenant, e.url, e.description, e.types, e.state, null::timestamptz as failing_since
from (
   select id, tenant_id, public_id, url, description, types, state from postrider.endpoints
   where state <> 'deleted' order by id desc limit $2
) e
join postrider.tenants t on t.id = e.tenant_id
where position(lower($1) in lower(e.url)) > 0 or position(lower($1) in lower(e.description)) > 0
order by e.id desc limit $3
