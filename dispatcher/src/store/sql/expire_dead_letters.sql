-- Deletes up to $4 dead letters that died before $3, and those of deleted endpoints, and no longer counts them.
-- $1 from this event, $2 below this event, $3 died before, $4 limit, $5 tenant or null for all. Returns how many.
with old as materialized (
    select d.endpoint_id, d.event_id from postrider.endpoints e
    cross join lateral (
        select d.endpoint_id, d.event_id from postrider.dead_letters d
        where d.endpoint_id = e.id and d.event_id >= $1 and d.event_id < $2
          and (d.died_at < $3 or e.state = 'deleted') limit $4) d
    where $5::int is null or e.tenant_id = $5
    limit $4
),
expired as (
    delete from postrider.dead_letters d using old o
    where d.endpoint_id = o.endpoint_id and d.event_id = o.event_id
    returning d.endpoint_id, d.type_id, d.reason, d.failure
),
uncounted as (
    update postrider.dead_letter_counts n set count = n.count - x.count
    from (select endpoint_id, type_id, reason, failure, count(*) from expired group by 1, 2, 3, 4) x
    where n.endpoint_id = x.endpoint_id and n.type_id = x.type_id and n.reason = x.reason and n.failure = x.failure
)
select count(*) from expired
