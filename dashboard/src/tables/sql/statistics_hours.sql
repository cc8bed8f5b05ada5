with made as (
    select coalesce(max(hour) + interval '1 hour', '-infinity') as until
    from postrider.hour_statistics where endpoint_id = 0
)
select h.hour as at, h.delivered, h.retried, h.dead, h.classes, h.durations
from unnest($1::int[]) as e (id)
cross join lateral (
    select * from postrider.hour_statistics h where h.endpoint_id = e.id and h.hour >= $2 offset 0) h
union all
select m.minute, m.delivered, m.retried, m.dead, m.classes, m.durations
from unnest($1::int[]) as e (id)
cross join lateral (
    select * from postrider.minute_statistics m
    where m.endpoint_id = e.id and m.minute >= greatest($2, (select until from made)) offset 0) m
