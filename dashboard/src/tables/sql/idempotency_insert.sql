insert into postrider.idempotency as i
    (scope, fingerprint, status, response, tenant_id, settles_shard, settles_xid)
values ($1, $2, $3, $4, (select id from postrider.tenants where slug = $5 and deleted_at is null), $6, $7::xid8)
on conflict (scope) do update
set fingerprint = excluded.fingerprint, status = excluded.status, response = excluded.response,
    tenant_id = excluded.tenant_id, created_at = excluded.created_at,
    settles_shard = excluded.settles_shard, settles_xid = excluded.settles_xid
where i.created_at <= clock_timestamp() - interval '72 hours'
