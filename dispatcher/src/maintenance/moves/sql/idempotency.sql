-- The next responses to a tenant's requests after $2, at most $3 of them and about 8 MB. The table has no index on tenants, which every
-- request with a key would pay for.
with next as (
    select i.*, sum(octet_length(i.response)) over (order by i.scope) as bytes
    from (select i.* from postrider.idempotency i
          where i.tenant_id = $1 and i.scope > decode($2, 'hex') order by i.scope limit $3) i
),
taken as (
    select n.* from next n where n.bytes <= 8388608 or n.scope = (select m.scope from next m order by m.scope limit 1)
)
select coalesce(json_agg(t), '[]')::text as rows,
       (select encode(l.scope, 'hex') from taken l order by l.scope desc limit 1) as last, count(*) as count
from taken t
