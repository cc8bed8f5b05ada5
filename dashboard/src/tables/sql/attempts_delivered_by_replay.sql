-- The attempts of a bulk replay, and how many of them were accepted: each of these is a delivery that it delivered.
-- $1 replay, $2 the accepted outcome, $3 attempts that are counted.
select count(*), count(*) filter (where a.outcome = $2)
from (
   (select a.outcome from postrider.attempts a where a.replay_id = $1 limit $3)
   union all
   (select a.outcome from postrider.archived_attempts a where a.replay_id = $1 limit $3)
) a
