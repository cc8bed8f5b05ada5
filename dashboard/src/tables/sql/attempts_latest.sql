-- The results of the latest attempts of these deliveries. $1 events, $2 their endpoints.
select d.event_id, d.endpoint_id, a.outcome, a.status
from unnest($1::uuid[], $2::int[]) as d (event_id, endpoint_id)
cross join lateral (
   select a.outcome, a.status from (
       (select a.number, a.outcome, a.status from postrider.attempts a
        where a.event_id = d.event_id and a.endpoint_id = d.endpoint_id order by a.number desc limit 1)
       union all
       (select a.number, a.outcome, a.status from postrider.archived_attempts a
        where a.event_id = d.event_id and a.endpoint_id = d.endpoint_id order by a.number desc limit 1)
   ) a order by a.number desc limit 1
) a
