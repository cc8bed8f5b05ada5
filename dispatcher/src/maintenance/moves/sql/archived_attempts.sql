-- The next archived attempts at a tenant's events, after the event, endpoint and number in $2, at most $3 of them and about 8 MB. When these are all of the events
-- that were looked at, `last` is the end of the last one of those.
with after as (
    select split_part($2, ' ', 1)::uuid as event, split_part($2, ' ', 2)::int as endpoint, split_part($2, ' ', 3)::int as number
),
event as materialized (
    select e.id from postrider.archived_events e, after
    where e.tenant_id = $1 and e.id >= after.event order by e.id
    -- So many that there are about as many attempts as wanted.
    limit greatest(20, $3 / (select greatest(count(*), 1) from postrider.endpoints p where p.tenant_id = $1 and p.state <> 'deleted'))
),
next as (
    select a.* from event e, after
    cross join lateral (
        select a.* from postrider.archived_attempts a
        where a.event_id = e.id and (e.id > after.event or (a.endpoint_id, a.number) > (after.endpoint, after.number))
        order by a.endpoint_id, a.number limit $3
    ) a
    order by a.event_id, a.endpoint_id, a.number limit $3
),
measured as (
    select n.*, row_number() over in_order as place,
           sum(coalesce(octet_length(n.response_body), 0) + coalesce(octet_length(n.response_head), 0)) over in_order as bytes
    from next n window in_order as (order by n.event_id, n.endpoint_id, n.number)
),
taken as (select m.* from measured m where m.bytes <= 8388608 or m.place = 1)
select coalesce(json_agg(t), '[]')::text as rows,
       case when count(*) = $3 or count(*) < (select count(*) from next)
            then (select concat_ws(' ', l.event_id, l.endpoint_id, l.number) from taken l
                  order by l.event_id desc, l.endpoint_id desc, l.number desc limit 1)
            else (select concat_ws(' ', e.id, 2147483647, 32767) from event e, after
                  where e.id > after.event or after.endpoint < 2147483647
                  order by e.id desc limit 1) end as last,
       count(*) as count
from taken t
