-- $1 minutes back, $2 the most rows looked at, $3 the most endpoints returned.
select t.slug as tenant, p.public_id as endpoint, w.failed
from (
    select endpoint_id, sum(retried + dead)::bigint as failed
    from (
        select endpoint_id, retried, dead from postrider.minute_statistics
        where any_failed and endpoint_id <> 0 and minute > clock_timestamp() - $1 * interval '1 minute'
        order by minute desc limit $2
    ) m
    group by endpoint_id
) w
join postrider.endpoints p on p.id = w.endpoint_id and p.state <> 'deleted'
join postrider.tenants t on t.id = p.tenant_id
where w.failed > 0
order by w.failed desc, p.id limit $3
