select e.id, e.chosen_id, case when e.size <= $4 then e.body end,
       case when e.size <= $4 then e.full_data end, null::bytea, e.size
from unnest($1::uuid[], $5::int[]) u(id, tenant_id)
cross join lateral (
    -- One index lookup per id, not `= any`: under a generic plan that would scan every partition. The bounds prune
    -- partitions of other days before any is opened. The size of a TOASTed value is known without fetching it.
    select e.id, e.chosen_id, e.body, e.full_data,
           octet_length(e.body) + coalesce(octet_length(e.full_data), 0) as size
    from postrider.events e
    where e.tenant_id = u.tenant_id and e.id = u.id and e.id >= $2 and e.id <= $3 limit 1
) e
