select r.id, r.public_id, t.slug as tenant, r.kind, e.public_id as endpoint, e.url, r.delivery_state,
   y.name as event_type, r.reason, r.failure, r.since, r.until, r.rate_per_second, r.state, r.asked_by, r.created_at,
   r.ended_at, r.measured_per_second, p.total, p.moved, p.skipped, p.queued, p.retrying, p.dead
from postrider.replays r
join postrider.tenants t on t.id = r.tenant_id
left join postrider.endpoints e on e.id = r.endpoint_id
left join postrider.event_types y on y.id = r.type_id
cross join lateral (
   select coalesce(sum(p.total), 0)::bigint as total, coalesce(sum(p.moved), 0)::bigint as moved,
       coalesce(sum(p.skipped), 0)::bigint as skipped, coalesce(sum(w.queued), 0)::bigint as queued,
       coalesce(sum(w.retrying), 0)::bigint as retrying, coalesce(sum(w.dead), 0)::bigint as dead
   from (
       select endpoint_id, sum(total) as total, sum(moved) as moved, sum(skipped) as skipped
       from postrider.replay_parts where replay_id = r.id group by endpoint_id
   ) p
   cross join lateral (
       select (select count(*) from postrider.queue q
               where q.endpoint_id = p.endpoint_id and q.replay_id = r.public_id) as queued,
              (select count(*) from postrider.retries q
               where q.endpoint_id = p.endpoint_id and q.replay_id = r.public_id) as retrying,
              (select count(*) from postrider.dead_letters q
               where q.endpoint_id = p.endpoint_id and q.replay_id = r.public_id) as dead
   ) w
) p
