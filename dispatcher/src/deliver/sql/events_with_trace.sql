select e.id, e.chosen_id, case when e.size <= $4 then e.body end,
       case when e.size <= $4 then e.full_data end, t.context, e.size
from unnest($1::uuid[], $5::int[]) u(id, tenant_id)
cross join lateral ( -- as in events.sql
    select e.id, e.chosen_id, e.body, e.full_data,
           octet_length(e.body) + coalesce(octet_length(e.full_data), 0) as size
    from postrider.events e
    where e.tenant_id = u.tenant_id and e.id = u.id and e.id >= $2 and e.id <= $3 limit 1
) e
left join postrider.traces t on t.event_id = u.id
