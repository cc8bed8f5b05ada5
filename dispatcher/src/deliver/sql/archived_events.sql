select e.id, e.chosen_id, case when e.size <= $3 then e.body end,
       case when e.size <= $3 then e.full_data end,
       case when $2 then (select t.context from postrider.traces t where t.event_id = e.id) end, e.size
from unnest($1::uuid[]) u(id)
cross join lateral (
    select e.id, e.chosen_id, e.body, e.full_data,
           octet_length(e.body) + coalesce(octet_length(e.full_data), 0) as size
    from postrider.archived_events e where e.id = u.id limit 1
) e
