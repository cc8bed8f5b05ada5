select a.id, a.at, a.actor, a.action, t.slug as tenant, a.subject, a.detail, a.address, a.changes
from postrider.audit a left join postrider.tenants t on t.id = a.tenant_id
where a.id < $1
  and ($3::int is null or a.tenant_id = $3)
  and ($4::text is null or a.actor = $4)
  and ($5::text is null or a.action = $5)
  and ($6::timestamptz is null or a.at >= $6)
  and ($7::timestamptz is null or a.at < $7)
order by a.id desc limit $2
