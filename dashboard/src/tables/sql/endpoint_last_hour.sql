-- Attempts of these endpoints ($1) since a minute ($2), and those of each dispatcher::statistics::Class.
select e.id, m.delivered, m.failed, m.classes
from unnest($1::int[]) as e (id)
cross join lateral (
    select coalesce(sum(s.delivered), 0)::bigint as delivered,
           coalesce(sum(s.retried + s.dead), 0)::bigint as failed,
           array[sum(s.classes[1]), sum(s.classes[2]), sum(s.classes[3]), sum(s.classes[4]), sum(s.classes[5]),
                 sum(s.classes[6]), sum(s.classes[7]), sum(s.classes[8]), sum(s.classes[9]), sum(s.classes[10]),
                 sum(s.classes[11])]::bigint[] as classes
    from postrider.minute_statistics s where s.endpoint_id = e.id and s.minute >= $2) m
where m.delivered + m.failed > 0
