select p.endpoint_id, p.source
from postrider.replays r
join postrider.replay_parts p on p.replay_id = r.id
join postrider.endpoints e on e.id = p.endpoint_id
where r.id = $1 and r.state = 'running' and not p.ended
  and (p.stepped_at is null or p.stepped_at <= clock_timestamp() - interval '1 second' / r.rate_per_second)
  and (e.state not in ('active', 'paused') or not exists (
       select from postrider.queue q where q.endpoint_id = p.endpoint_id and q.replay_id is not null
       offset $2 - 1 limit 1))
order by p.stepped_at nulls first, p.endpoint_id, p.source limit $3
