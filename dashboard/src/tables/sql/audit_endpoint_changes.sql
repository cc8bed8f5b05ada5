-- Changes of what a tenant's endpoints receive, newest first. Postrider disables only active endpoints.
-- $1 tenant, $2 entries that are searched, $3 changes that are read.
select a.at, a.subject as endpoint,
   case when a.action = 'endpoint.disabled' then '"active"' else a.changes -> 'state' -> 'before' end as state_before,
   case when a.action = 'endpoint.disabled' then '"disabled"' else a.changes -> 'state' -> 'after' end as state_after,
   a.changes -> 'types' -> 'before' as types_before, a.changes -> 'versions' -> 'before' as versions_before,
   a.changes -> 'filter' -> 'before' as filter_before, a.detail ->> 'reason' as reason
from (
   select id, at, action, subject, detail, changes from postrider.audit where tenant_id = $1 order by id desc limit $2
) a
where a.action = 'endpoint.disabled'
   or a.action = 'endpoint.changed' and a.changes ?| array['state', 'types', 'versions', 'filter']
order by a.id desc limit $3
