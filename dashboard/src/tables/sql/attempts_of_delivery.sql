select number, started_at, duration_ms, outcome, status, error, signature, response_head,
   response_body, replay_id, timing
from postrider.attempts where event_id = $1 and endpoint_id = $2
union all
select number, started_at, duration_ms, outcome, status, error, signature, response_head,
   response_body, replay_id, timing
from postrider.archived_attempts where event_id = $1 and endpoint_id = $2
order by number desc limit $3
