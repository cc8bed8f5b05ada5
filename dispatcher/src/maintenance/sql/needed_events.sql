select distinct n.event_id, e.tenant_id from postrider.endpoints e
cross join lateral (
   (select q.event_id from postrider.queue q
    where q.endpoint_id = e.id and q.event_id > $1 and q.event_id < $2 order by q.event_id limit $3)
   union all
   (select q.event_id from postrider.retries q
    where q.endpoint_id = e.id and q.event_id > $1 and q.event_id < $2 order by q.event_id limit $3)
   union all
   (select q.event_id from postrider.dead_letters q
    where q.endpoint_id = e.id and q.event_id > $1 and q.event_id < $2 order by q.event_id limit $3)
) n
where e.state <> 'deleted' and ($4::int is null or e.tenant_id = $4)
order by n.event_id limit $3
