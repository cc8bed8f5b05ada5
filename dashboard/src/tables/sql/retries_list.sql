select r.event_id, r.endpoint_id, ($6::int[] is null or r.type_id = any($6)) and ($7::smallint is null or r.attempt >= $7) as may_match
from (
   select e.id from unnest($1::int[]) as e (id)
   cross join lateral (
       select r.event_id from postrider.retries r
       where r.endpoint_id = e.id and r.event_id between $2 and $3 and (r.event_id < $3 or e.id < $4)
       order by r.event_id desc limit 1) h
   order by h.event_id desc, e.id desc limit $5) e
cross join lateral (
   select r.event_id, r.endpoint_id, r.type_id, r.attempt from postrider.retries r
   where r.endpoint_id = e.id and r.event_id between $2 and $3 and (r.event_id < $3 or e.id < $4)
   order by r.event_id desc limit $5) r
order by r.event_id desc, r.endpoint_id desc limit $5
