-- The events of all tenants, newest first. Events are indexed by tenant: the tenants with the newest ones are looked up
-- first, so that the events of few tenants are read.
-- $1 from this event, $2 before this event, $3 limit, $4 types, $5 tenants that are probed.
with t as materialized (
   select id from postrider.tenants where deleted_at is null order by id limit $5
),
h as materialized (
   select t.id from t cross join lateral (
      select v.id from postrider.events v where v.tenant_id = t.id and v.id >= $1 and v.id < $2 order by v.id desc limit 1
   ) h
   order by h.id desc limit $3
)
select v.id, v.tenant_id, $4::int[] is null or v.type_id = any($4) as may_match
from (
   (select v.id, v.tenant_id, v.type_id from h cross join lateral (
       select v.id, v.tenant_id, v.type_id from postrider.events v
       where v.tenant_id = h.id and v.id >= $1 and v.id < $2 order by v.id desc limit $3
    ) v
    order by v.id desc limit $3)
   union all
   (select id, tenant_id, type_id from postrider.archived_events where id >= $1 and id < $2 order by id desc limit $3)
) v
order by v.id desc limit $3
