-- The newest undelivered deliveries of an endpoint that have failed: its dead letters, and those that wait for a retry. The
-- failure of a dead letter is stored; that of the others is in their last attempt.
-- $1 endpoint, $2 limit of each.
(select d.event_id, d.died_at as failed_at, d.failure, null::smallint as status, null::smallint as outcome
 from postrider.dead_letters d where d.endpoint_id = $1 order by d.event_id desc limit $2)
union all
select r.event_id, a.started_at, null, a.status, a.outcome
from (select event_id, attempt from postrider.retries
      where endpoint_id = $1 order by event_id desc limit $2) r
cross join lateral (
   select started_at, status, outcome from postrider.attempts
   where event_id = r.event_id and endpoint_id = $1 and number = r.attempt
   union all
   select started_at, status, outcome from postrider.archived_attempts
   where event_id = r.event_id and endpoint_id = $1 and number = r.attempt
   limit 1
) a
