select p.id, p.public_id as endpoint, p.url, t.slug as tenant, p.state, h.failing_since
from (
    select endpoint_id, sum(retried + dead) as failed
    from (
        select endpoint_id, retried, dead from postrider.minute_statistics
        where any_failed and endpoint_id <> 0 and minute >= $1
          and ($2::int is null or endpoint_id in (select id from postrider.endpoints where tenant_id = $2))
        order by minute desc limit $3
    ) m
    group by endpoint_id
) w
join postrider.endpoints p on p.id = w.endpoint_id and p.state <> 'deleted'
join postrider.tenants t on t.id = p.tenant_id
left join postrider.endpoint_health h on h.endpoint_id = w.endpoint_id
order by w.failed desc, p.id limit $4
