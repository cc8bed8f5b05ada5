with made as (
    select coalesce(max(hour) + interval '1 hour', '-infinity') as until
    from postrider.hour_statistics where endpoint_id = 0
)
select h.endpoint_id, h.hour as at, h.delivered::bigint, h.retried::bigint, h.dead::bigint
from unnest($1::int[]) as e (id)
cross join lateral (
    select * from postrider.hour_statistics h where h.endpoint_id = e.id and h.hour >= $2 offset 0) h
union all
select m.endpoint_id, date_trunc('hour', m.minute, 'UTC'), sum(m.delivered), sum(m.retried), sum(m.dead)
from unnest($1::int[]) as e (id)
cross join lateral (
    select * from postrider.minute_statistics m
    where m.endpoint_id = e.id and m.minute >= greatest($2, (select until from made)) offset 0) m
group by 1, 2
