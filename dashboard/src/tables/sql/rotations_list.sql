select e.id as number, e.public_id as endpoint, e.url, t.slug as tenant, s.created_at as rotated_at, older.retires_at,
       nullif(coalesce(e.rotate_every_days, t.rotate_every_days), 0) as rotate_every_days,
       coalesce(p.rotates_at, s.created_at + make_interval(
           days => nullif(coalesce(e.rotate_every_days, t.rotate_every_days), 0))) as next_rotation_at,
       p.announced_at, refused.count as refusals_since, refused.last_at as last_refusal_at
from postrider.endpoints e
join postrider.tenants t on t.id = e.tenant_id
join postrider.secrets s on s.endpoint_id = e.id and s.retires_at is null
left join postrider.planned_rotations p on p.secret_id = s.id
left join lateral (
    select max(o.retires_at) as retires_at from postrider.secrets o
    where o.endpoint_id = e.id and o.retires_at > clock_timestamp()
) older on true
left join lateral (
    select count(*) as count, max(a.started_at) as last_at from (
        select started_at from postrider.attempts
        where endpoint_id = e.id and status in (401, 403) and started_at >= s.created_at
          and exists (select from postrider.secrets o where o.endpoint_id = e.id and o.id < s.id)
        order by started_at desc limit $4
    ) a
) refused on true
where ($1::int is null or e.tenant_id = $1) and ($5::int is null or e.id = $5)
  and (not $6 or older.retires_at is not null or refused.count > 0
       or coalesce(e.rotate_every_days, t.rotate_every_days, 0) > 0)
  and e.state <> 'deleted' and e.id > $2
  and not exists (select from postrider.listeners l where l.endpoint_id = e.id)
order by e.id limit $3
