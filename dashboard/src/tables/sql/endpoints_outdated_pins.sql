select x.id as endpoint_id, p.key as event_type, p.value as pinned, newest.version as newest,
       (select s.version from postrider.schemas s
        where s.type_id = y.id and s.emitted and s.rank > coalesce(mine.rank, '')
        order by s.rank desc limit 1) as emitted
from postrider.endpoints x
cross join lateral jsonb_each_text(x.versions) p
join postrider.event_types y on y.name = p.key and y.deleted_at is null
join lateral (
    select s.version from postrider.schemas s where s.type_id = y.id order by s.rank desc limit 1
) newest on true
left join postrider.schemas mine on mine.type_id = y.id and mine.version = p.value
where x.id = any($1) and newest.version <> p.value order by x.id, p.key
