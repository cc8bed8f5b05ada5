select e.id, e.chosen_id, y.name as type_name, e.body, clock_timestamp() as now
from (
   select q.event_id, q.tenant_id from postrider.queue q
   join postrider.tenants t on t.id = q.tenant_id and t.is_here
   where q.endpoint_id = $1 and exists (select from postrider.listeners where endpoint_id = $1 and holder = $2)
   order by q.event_id limit $3
) q
join postrider.events e on e.tenant_id = q.tenant_id and e.id = q.event_id
join postrider.event_types y on y.id = e.type_id
order by e.id
