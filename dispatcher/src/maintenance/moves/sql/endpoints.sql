-- The next endpoints of a tenant after $2, at most $3: deleted ones too, which deliveries name.
with taken as (
    select e.* from postrider.endpoints e where e.tenant_id = $1 and e.id > $2::int order by e.id limit $3
)
select coalesce(json_agg(t), '[]')::text as rows, max(t.id)::text as last, count(*) as count from taken t
