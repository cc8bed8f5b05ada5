-- The results that attempts of these deliveries had, if they ended in this time. Starts are stored in whole seconds.
-- $1 events, $2 their endpoints, $3 since, $4 until.
select distinct d.event_id, d.endpoint_id, a.outcome, a.status
from unnest($1::uuid[], $2::int[]) as d (event_id, endpoint_id)
cross join lateral (
   select a.outcome, a.status, a.started_at + a.duration_ms * interval '1 ms' as ended_at from postrider.attempts a
   where a.event_id = d.event_id and a.endpoint_id = d.endpoint_id
   union all
   select a.outcome, a.status, a.started_at + a.duration_ms * interval '1 ms' from postrider.archived_attempts a
   where a.event_id = d.event_id and a.endpoint_id = d.endpoint_id
) a
where ($3::timestamptz is null or a.ended_at >= $3) and ($4::timestamptz is null or a.ended_at < $4)
