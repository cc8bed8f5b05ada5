-- The deliveries that a bulk replay has attempted, by the index of replayed attempts, and those that it has queued.
-- $1 replay, $2 from this event, $3 and $4 before this delivery, $5 limit, $6 types, $7 endpoint.
select d.event_id, d.endpoint_id,
   ($6::int[] is null or d.type_id = any($6)) and ($7::int is null or d.endpoint_id = $7) as may_match
from (
   (select distinct on (a.event_id, a.endpoint_id) a.event_id, a.endpoint_id, a.type_id from postrider.attempts a
    where a.replay_id = $1 and a.event_id between $2 and $3 and (a.event_id < $3 or a.endpoint_id < $4)
    order by a.event_id desc, a.endpoint_id desc limit $5)
   union
   (select distinct on (a.event_id, a.endpoint_id) a.event_id, a.endpoint_id, a.type_id from postrider.archived_attempts a
    where a.replay_id = $1 and a.event_id between $2 and $3 and (a.event_id < $3 or a.endpoint_id < $4)
    order by a.event_id desc, a.endpoint_id desc limit $5)
   union
   select q.event_id, q.endpoint_id, q.type_id
   from postrider.replays r
   join postrider.replay_parts p on p.replay_id = r.id
   join postrider.queue q on q.endpoint_id = p.endpoint_id and q.replay_id = $1
   where r.public_id = $1 and q.event_id between $2 and $3 and (q.event_id < $3 or q.endpoint_id < $4)
) d
order by d.event_id desc, d.endpoint_id desc limit $5
