-- The ended deliveries of a tenant's events, newest first. An event without one has an entry below all of its endpoints.
-- $1 tenant, $2 from this event, $3 and $4 before this delivery, $5 limit, $6 types, $7 status, $8 state,
-- $9 attempted since, $10 attempted until, $11 only failed, $12 least number of attempts.
-- A delivery with a single attempt is judged by it: whether it ended in the time asked for, and failed if only failed ones are
-- asked for. The attempts of others are looked up afterwards.
select v.id as event_id, coalesce(a.endpoint_id, -2147483648) as endpoint_id, coalesce(a.may_match, false) as may_match
from (
   select v.id from postrider.events v
   where v.tenant_id = $1 and v.id between $2 and $3 and (v.id < $3 or $4 > -2147483648)
   order by v.id desc limit $5
) v
left join lateral (
   select a.endpoint_id,
      ($6::int[] is null or a.type_id = any($6)) and ($7::smallint is null or a.status is not distinct from $7)
      and ($8::text is null or a.final::text = $8) and ($12::smallint is null or a.number >= $12)
      and (a.number > 1 or (($9::timestamptz is null or a.started_at + a.duration_ms * interval '1 ms' >= $9)
         and ($10::timestamptz is null or a.started_at + a.duration_ms * interval '1 ms' < $10)
         and (not $11::boolean or a.final <> 'delivered'))) as may_match
   from postrider.attempts a
   where a.event_id = v.id and a.final is not null and (v.id < $3 or a.endpoint_id < $4)
   order by a.endpoint_id desc limit $5
) a on true
order by 1 desc, 2 desc limit $5
