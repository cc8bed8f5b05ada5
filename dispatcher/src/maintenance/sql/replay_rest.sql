update postrider.replays r
set step_at = clock_timestamp() + $2 * interval '1 millisecond', idle_ms = $2,
    measured_at = case when n.done is null then r.measured_at else clock_timestamp() end,
    measured_done = coalesce(n.done, r.measured_done),
    measured_per_second = case
       when n.done is null or n.seconds is null then r.measured_per_second
       else coalesce(r.measured_per_second, n.rate) * n.kept + n.rate * (1 - n.kept)
    end
from (
   select m.id, m.done, m.seconds, power($3::float8, m.seconds) as kept,
       greatest(m.done - m.measured_done, 0) / m.seconds as rate
   from (
       select o.id, o.measured_done, extract(epoch from clock_timestamp() - o.measured_at)::float8 as seconds,
           case when o.measured_at is null or o.measured_at < clock_timestamp() - interval '1 second' then (
               select coalesce(sum(p.moved - (
                   select count(*) from postrider.queue q
                   where q.endpoint_id = p.endpoint_id and q.replay_id = o.public_id)), 0)::bigint
               from (select endpoint_id, sum(moved) as moved from postrider.replay_parts
                     where replay_id = o.id group by endpoint_id) p
           ) end as done
       from postrider.replays o where o.id = $1
   ) m
) n
where r.id = n.id and r.state = 'running'
