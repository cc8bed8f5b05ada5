select clock_timestamp() as now, a.*,
       (select coalesce(sum(c.count), 0)::bigint from postrider.dead_letter_counts c
        where $1::int is null or c.tenant_id = $1) as dead_letters
from (
    select coalesce(sum(a.in_flight), 0)::bigint as in_flight,
           min(a.oldest_at) as oldest_at,
           count(*) filter (where a.circuit_open) as circuits_open
    from postrider.endpoint_activity a
    join postrider.dispatchers d on d.id = a.writer and d.expires_at > clock_timestamp()
    where $1::int is null or a.endpoint_id in (select id from postrider.endpoints where tenant_id = $1)
) a
