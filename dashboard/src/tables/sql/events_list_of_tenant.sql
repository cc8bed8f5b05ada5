-- A tenant's events, newest first.
-- $1 from this event, $2 before this event, $3 limit, $4 types, $5 tenant.
select v.id, v.tenant_id, $4::int[] is null or v.type_id = any($4) as may_match
from (
   (select id, tenant_id, type_id from postrider.events
    where tenant_id = $5 and id >= $1 and id < $2 order by id desc limit $3)
   union all
   (select id, tenant_id, type_id from postrider.archived_events
    where tenant_id = $5 and id >= $1 and id < $2 order by id desc limit $3)
) v
order by v.id desc limit $3
