-- Deletes up to $3 rows of a deleted endpoint from queue, in the order of their events.
-- $1 endpoint, $2 after this event, $3 limit. Returns how many were deleted, and the last event read.
with picked as materialized (
    select event_id from postrider.queue where endpoint_id = $1 and event_id > $2 order by event_id limit $3
),
dropped as (
    delete from postrider.queue q using picked p where q.endpoint_id = $1 and q.event_id = p.event_id returning 1
)
select (select count(*) from dropped), (select event_id from picked order by event_id desc limit 1)
