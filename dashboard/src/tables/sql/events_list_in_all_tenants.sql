-- The events of all tenants, newest first. Events are indexed by tenant: the tenants with the newest ones are looked up
-- first, so that the events of few tenants are read. Those with any event in these days are found by going through the index from
-- one tenant to the next. If there are many, each tenant is probed.
-- $1 from this event, $2 before this event, $3 limit, $4 types, $5 tenants that are probed, $6 and $7 the days of $1 and $2, whole,
-- so that the index is never read past the events of a tenant, $8 tenants that are found in the index.
with recursive w as (
   (select v.tenant_id from postrider.events v where v.id >= $6 and v.id < $7 order by v.tenant_id limit 1)
   union all
   select (select v.tenant_id from postrider.events v
           where v.tenant_id > w.tenant_id and v.id >= $6 and v.id < $7 order by v.tenant_id limit 1)
   from w where w.tenant_id is not null
),
few as materialized (
   select tenant_id from w where tenant_id is not null limit $8 + 1
),
t as materialized (
   select t.id from few join postrider.tenants t on t.id = few.tenant_id and t.deleted_at is null
   where (select count(*) from few) <= $8
   union all
   (select id from postrider.tenants where deleted_at is null and (select count(*) from few) > $8 order by id limit $5)
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
