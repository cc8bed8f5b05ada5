select e.id, e.public_id, t.slug as tenant, e.url, e.description, e.types, e.state, h.failing_since,
   t.paused_at is not null as tenant_paused,
   coalesce((select stopped from postrider.sending_state()), true) as sending_stopped
from postrider.endpoints e
join postrider.tenants t on t.id = e.tenant_id
left join postrider.endpoint_health h on h.endpoint_id = e.id
where e.state <> 'deleted' and e.id < $1 and ($2::int is null or e.tenant_id = $2)
  and ($3::text is null or e.state = $3::postrider.endpoint_state)
  and ($4::text is null or position(lower($4) in lower(e.url)) > 0
       or position(lower($4) in lower(e.description)) > 0)
order by e.id desc limit $5
