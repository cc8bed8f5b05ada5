-- The ended deliveries of all tenants, newest first.
-- $1 from this event, $2 and $3 before this delivery, $4 limit, $5 types, $6 status, $7 state, $8 attempted since, $9 attempted
-- until, $10 only failed, $11 least number of attempts.
-- A delivery with a single attempt is judged by it: whether it ended in the time asked for, and failed if only failed ones are
-- asked for. The attempts of others are looked up afterwards.
select a.event_id, a.endpoint_id,
   ($5::int[] is null or a.type_id = any($5)) and ($6::smallint is null or a.status is not distinct from $6)
      and ($7::text is null or a.final::text = $7) and ($11::smallint is null or a.number >= $11)
      and (a.number > 1 or (($8::timestamptz is null or a.started_at + a.duration_ms * interval '1 ms' >= $8)
         and ($9::timestamptz is null or a.started_at + a.duration_ms * interval '1 ms' < $9)
         and (not $10::boolean or a.final <> 'delivered'))) as may_match
from postrider.attempts a
where a.final is not null and a.event_id between $1 and $2 and (a.event_id < $2 or a.endpoint_id < $3)
order by a.event_id desc, a.endpoint_id desc limit $4
