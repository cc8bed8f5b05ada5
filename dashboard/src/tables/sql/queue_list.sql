select q.event_id, q.endpoint_id,
   ($6::int[] is null or q.type_id = any($6)) and (not $7::boolean or q.attempt > 0) as may_match
from (
   select e.id from unnest($1::int[]) as e (id)
   cross join lateral (
       select q.event_id from postrider.queue q
       where q.endpoint_id = e.id and q.event_id between $2 and $3 and (q.event_id < $3 or e.id < $4)
       order by q.event_id desc limit 1) h
   order by h.event_id desc, e.id desc limit $5) e
cross join lateral (
   select q.event_id, q.endpoint_id, q.type_id, q.attempt from postrider.queue q
   where q.endpoint_id = e.id and q.event_id between $2 and $3 and (q.event_id < $3 or e.id < $4)
   order by q.event_id desc limit $5) q
order by q.event_id desc, q.endpoint_id desc limit $5
