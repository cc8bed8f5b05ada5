-- The next archived events of a tenant after $2, at most $3 of them and about 8 MB.
with next as (
    select e.*, sum(octet_length(e.body) + coalesce(octet_length(e.full_data), 0)) over (order by e.id) as bytes
    from (select e.* from postrider.archived_events e where e.tenant_id = $1 and e.id > $2::uuid order by e.id limit $3) e
),
taken as (
    select n.* from next n where n.bytes <= 8388608 or n.id = (select min(m.id::text)::uuid from next m)
)
select coalesce(json_agg(t), '[]')::text as rows, max(t.id::text) as last, count(*) as count from taken t
