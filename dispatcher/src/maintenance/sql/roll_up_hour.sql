with minute as materialized (
    select * from postrider.minute_statistics where minute >= $1 and minute < $1 + interval '1 hour'
),
total as (
    select endpoint_id, sum(delivered) as delivered, sum(retried) as retried, sum(dead) as dead
    from minute group by endpoint_id
),
class as (
    select endpoint_id, array_agg(sum order by place) as counts from (
        select m.endpoint_id, u.place, sum(u.count)::int from minute m,
            unnest(m.classes) with ordinality as u (count, place) group by m.endpoint_id, u.place) c
    group by endpoint_id
),
duration as (
    select endpoint_id, array_agg(sum order by place) as counts from (
        select m.endpoint_id, u.place, sum(u.count)::int from minute m,
            unnest(m.durations) with ordinality as u (count, place) group by m.endpoint_id, u.place) d
    group by endpoint_id
)
insert into postrider.hour_statistics (endpoint_id, hour, delivered, retried, dead, classes, durations)
select t.endpoint_id, $1, t.delivered, t.retried, t.dead, c.counts, d.counts
from total t join class c using (endpoint_id) join duration d using (endpoint_id)
on conflict (endpoint_id, hour) do update
set delivered = excluded.delivered, retried = excluded.retried, dead = excluded.dead,
    classes = excluded.classes, durations = excluded.durations
