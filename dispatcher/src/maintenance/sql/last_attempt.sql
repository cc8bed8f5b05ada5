select v.chosen_id, y.name as type_name, d.reason, a.status, a.error
from (
   select type_id, chosen_id from postrider.events
   where id = $1 and tenant_id = (select tenant_id from postrider.endpoints where id = $2)
   union all
   select type_id, chosen_id from postrider.archived_events where id = $1
   limit 1
) v
join postrider.event_types y on y.id = v.type_id
left join postrider.dead_letters d on d.endpoint_id = $2 and d.event_id = $1
left join (
   select status, error from postrider.attempts where event_id = $1 and endpoint_id = $2 and number = $3
   union all
   select status, error from postrider.archived_attempts where event_id = $1 and endpoint_id = $2 and number = $3
) a on true
limit 1
