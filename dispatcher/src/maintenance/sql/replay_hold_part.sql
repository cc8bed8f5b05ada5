select r.public_id, r.tenant_id, r.kind, r.type_id, r.reason, r.failure, r.since, r.until, r.created_at,
   r.rate_per_second, p.after_event, p.stepped_at, e.state as endpoint_state, clock_timestamp() as now,
   (select count(*) from postrider.queue q
    where q.endpoint_id = p.endpoint_id and q.replay_id is not null) as queued
from postrider.replay_parts p
join postrider.replays r on r.id = p.replay_id
join postrider.endpoints e on e.id = p.endpoint_id
join postrider.tenants t on t.id = r.tenant_id and t.is_here
where p.replay_id = $1 and p.endpoint_id = $2 and p.source = $3::postrider.replay_source and not p.ended
for update of p skip locked
