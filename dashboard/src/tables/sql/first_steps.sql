-- The tenant and the event types of the demo, which `postrider up` creates, are not the reader's own.
with t as not materialized (
   select id, slug, created_at from postrider.tenants where deleted_at is null and slug <> 'demo'
), y as (
   select id, name, deleted_at from postrider.event_types where name not like 'postrider.%' and name not like 'demo.%'
)
select
   (select slug from t order by id desc limit 1) as tenant,
   (select name from y where deleted_at is null order by id desc limit 1) as event_type,
   (select e.public_id from postrider.endpoints e join t on t.id = e.tenant_id
    where e.state <> 'deleted' order by e.id desc limit 1) as endpoint,
   -- Noted by the emit itself, so that no events are searched.
   exists (select from y join postrider.schemas s on s.type_id = y.id where s.emitted) as has_event,
   exists (select from postrider.trials r join postrider.endpoints e on e.id = r.endpoint_id join t on t.id = e.tenant_id
           where r.passed_at is not null) as is_verified,
   coalesce((select created_at from t order by id limit 1) < clock_timestamp() - make_interval(days => $1), false) as is_old
