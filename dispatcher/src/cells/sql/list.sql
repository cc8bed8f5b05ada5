-- Each cell, as home sees it. Rows of the outbox are counted up to a limit.
-- $1 the limit.
select c.id, c.name, c.state, c.url,
       (select count(*) from postrider.tenants t where t.cell_id = c.id and t.deleted_at is null) as tenants,
       (select count(*) from (
           select from postrider.cell_outbox o where o.cell_id = c.id
           union all
           select from postrider.cell_outbox o join postrider.tenants t on t.id = o.tenant_id
           where o.cell_id is null and t.cell_id = c.id
           limit $1) o) as outbox,
       s.active as follows,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn)::bigint as behind_bytes,
       s.wal_status
from postrider.cells c
left join pg_replication_slots s
    on s.slot_name = (select format('postrider_%s_cell_%s', d.oid, c.id) from pg_database d where d.datname = current_database())
order by c.id
