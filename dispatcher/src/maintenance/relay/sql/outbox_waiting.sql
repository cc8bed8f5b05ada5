-- The first waiting events of some tenants, without those that were set aside. Only those that the tail has passed: an event that
-- comes before one of them may still be in it.
-- $1 tenants, $2 the tail's snapshot, $3 limit for each tenant, $4 slugs of tenants, $5 numbers, $6 and $7 slugs and keys that are
-- left out.
select o.n, o.bytes from postrider.tenants t
cross join lateral (
    select o.n, octet_length(o.data) as bytes from postrider.cell_outbox o
    where o.tenant_id = t.id and o.cell_id is null and pg_visible_in_snapshot(o.xid, $2::pg_snapshot)
      and o.n <> all($5::bigint[])
      and not exists (select from unnest($6::text[], $7::text[]) as a (tenant, key)
                      where a.tenant = t.slug and a.key = o.ordering_key)
    order by o.n limit $3
) o
where t.id = any($1::int[]) and t.slug <> all($4::text[])
order by o.n
