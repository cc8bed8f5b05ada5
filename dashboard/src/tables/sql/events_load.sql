select e.id, e.tenant_id, y.name as type_name, s.version, e.chosen_id, e.ordering_key, e.sequence, e.body, e.full_data,
   e.is_archived
from unnest($2::uuid[]) as u (id)
cross join lateral (
   select v.id, v.tenant_id, v.type_id, v.schema_id, v.chosen_id, v.ordering_key, v.sequence, v.body,
       v.full_data, false as is_archived
   from postrider.events v where v.tenant_id = $1 and v.id = u.id
   union all
   select v.id, v.tenant_id, v.type_id, v.schema_id, v.chosen_id, v.ordering_key, v.sequence, v.body,
       v.full_data, true
   from postrider.archived_events v where v.tenant_id = $1 and v.id = u.id
   limit 1
) e
join postrider.event_types y on y.id = e.type_id
join postrider.schemas s on s.id = e.schema_id
order by e.id desc
