-- The counters of these endpoints since a minute: of whole hours as far as these are aggregated, and of the minutes before and
-- after them. $1 endpoints, $2 since.
with made as (
    select date_trunc('hour', $2::timestamptz + interval '59 minutes 59 seconds', 'UTC') as whole,
           coalesce(max(hour) + interval '1 hour', '-infinity') as until
    from postrider.hour_statistics where endpoint_id = 0
)
select h.hour as at, h.delivered, h.retried, h.dead, h.classes, h.durations
from unnest($1::int[]) as e (id)
cross join lateral (
    select * from postrider.hour_statistics h
    where h.endpoint_id = e.id and h.hour >= (select whole from made) and h.hour < (select until from made) offset 0) h
union all
select m.minute, m.delivered, m.retried, m.dead, m.classes, m.durations
from unnest($1::int[]) as e (id)
cross join lateral (
    select * from postrider.minute_statistics m
    where m.endpoint_id = e.id and m.minute >= $2 and m.minute < (select whole from made) offset 0) m
union all
select m.minute, m.delivered, m.retried, m.dead, m.classes, m.durations
from unnest($1::int[]) as e (id)
cross join lateral (
    select * from postrider.minute_statistics m
    where m.endpoint_id = e.id and m.minute >= (select greatest(whole, until) from made) offset 0) m
