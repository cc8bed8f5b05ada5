select t.id, t.slug, t.name, t.rotate_every_days, t.retention_days, t.all_operational_events,
   t.paused_at, t.pause_reason, t.created_at, t.cell_id,
   (select count(*) from postrider.endpoints e
    where e.tenant_id = t.id and e.state <> 'deleted') as endpoints,
   (select coalesce(sum(n.count), 0)::bigint from postrider.dead_letter_counts n
    where n.tenant_id = t.id) as dead_letters
from postrider.tenants t
where t.deleted_at is null and t.slug > $2
  and position(lower($1) in lower(concat(t.slug, ' ', t.name))) > 0
order by t.slug limit $3
