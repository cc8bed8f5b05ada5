with picked as materialized (
    select event_id from postrider.queue where endpoint_id = $1 and event_id > $2 order by event_id limit $3
), gone as (
    delete from postrider.queue q using picked p where q.endpoint_id = $1 and q.event_id = p.event_id returning 1
)
select (select count(*) from gone), (select event_id from picked order by event_id desc limit 1)
