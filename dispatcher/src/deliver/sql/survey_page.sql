select e.id as endpoint, e.shard, q.event_id as first, r.due_at as next_due
from (select e.id, e.shard from postrider.endpoints e
      where e.id > $2 and e.shard = any($1) and e.state <> 'deleted' order by e.id limit $3) e
left join lateral (select q.event_id from postrider.queue q
                   where q.endpoint_id = e.id order by q.event_id limit 1) q on true
left join lateral (select r.due_at from postrider.retries r
                   where r.endpoint_id = e.id and r.attempt >= 0 order by r.due_at limit 1) r on true
order by e.id
