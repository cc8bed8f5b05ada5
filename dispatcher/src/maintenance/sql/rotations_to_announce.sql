select s.id as secret_id, e.id as endpoint_id, e.public_id, e.url, t.id as tenant_id,
       greatest(s.created_at + make_interval(days => coalesce(e.rotate_every_days, t.rotate_every_days)),
                clock_timestamp() + make_interval(days => $1)) as rotates_at
from postrider.endpoints e
join postrider.tenants t on t.id = e.tenant_id and t.deleted_at is null and t.is_here
join postrider.secrets s on s.endpoint_id = e.id and s.retires_at is null
where e.state <> 'deleted' and coalesce(e.rotate_every_days, t.rotate_every_days) > 0
  and s.created_at + make_interval(days => coalesce(e.rotate_every_days, t.rotate_every_days) - $1)
      <= clock_timestamp()
  and s.id > $2
  and not exists (select from postrider.planned_rotations p where p.secret_id = s.id)
order by s.id limit $3
