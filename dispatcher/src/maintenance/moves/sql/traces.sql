-- The trace contexts of the next events of a tenant after $2, at most $3.
with event as materialized (
    select e.id from postrider.events e where e.tenant_id = $1 and e.id > $2::uuid order by e.id limit $3
)
select coalesce((select json_agg(t) from postrider.traces t where t.event_id in (select id from event)), '[]')::text as rows,
       (select max(e.id::text) from event e) as last, (select count(*) from postrider.traces t where t.event_id in (select id from event)) as count
