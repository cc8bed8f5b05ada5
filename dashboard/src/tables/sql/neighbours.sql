-- The deliveries of an endpoint before and after one, by the time of their events. Each lookup reads one row of an index.
-- $1 endpoint, $2 event.
select
   (select n.event_id from (
       (select event_id from postrider.queue where endpoint_id = $1 and event_id < $2 order by event_id desc limit 1)
       union all
       (select event_id from postrider.retries where endpoint_id = $1 and event_id < $2 order by event_id desc limit 1)
       union all
       (select event_id from postrider.dead_letters where endpoint_id = $1 and event_id < $2 order by event_id desc limit 1)
       union all
       (select event_id from postrider.attempts
        where endpoint_id = $1 and final is not null and event_id < $2 order by event_id desc limit 1)
    ) n order by n.event_id desc limit 1) as older,
   (select n.event_id from (
       (select event_id from postrider.queue where endpoint_id = $1 and event_id > $2 order by event_id limit 1)
       union all
       (select event_id from postrider.retries where endpoint_id = $1 and event_id > $2 order by event_id limit 1)
       union all
       (select event_id from postrider.dead_letters where endpoint_id = $1 and event_id > $2 order by event_id limit 1)
       union all
       (select event_id from postrider.attempts
        where endpoint_id = $1 and final is not null and event_id > $2 order by event_id limit 1)
    ) n order by n.event_id limit 1) as newer
