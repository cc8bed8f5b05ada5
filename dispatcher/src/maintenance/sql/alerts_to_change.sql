select a.endpoint_id, a.dead_letters as threshold, e.tenant_id, e.public_id as endpoint, e.url,
   c.count as dead_letters
from postrider.alerts a
join postrider.endpoints e on e.id = a.endpoint_id
join postrider.tenants t on t.id = e.tenant_id and t.is_here
cross join lateral (
   select coalesce(sum(c.count), 0)::bigint as count from postrider.dead_letter_counts c
   join postrider.event_types y on y.id = c.type_id and y.name not like 'postrider.%'
   where c.endpoint_id = a.endpoint_id
) c
where (a.passed_at is null) = (c.count >= a.dead_letters) limit $1
