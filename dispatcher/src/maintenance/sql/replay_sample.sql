select d.event_id, d.endpoint_id, v.chosen_id, y.name as event_type, p.public_id as endpoint
from unnest($1::uuid[], $2::int[]) with ordinality as d (event_id, endpoint_id, n)
join postrider.endpoints p on p.id = d.endpoint_id
cross join lateral (
   select chosen_id, type_id from postrider.events where tenant_id = p.tenant_id and id = d.event_id
   union all
   select chosen_id, type_id from postrider.archived_events where id = d.event_id
   limit 1
) v
join postrider.event_types y on y.id = v.type_id
order by d.n
