-- Makes a delivery that waits for its next attempt due now. It keeps its ordering key and its place in the order.
-- $1 event, $2 endpoint, $3 number of the last attempt.
with taken as (
    delete from postrider.retries r using postrider.endpoints e
    where r.endpoint_id = $2 and r.event_id = $1 and r.attempt = $3
      and e.id = r.endpoint_id and e.state in ('active', 'paused')
    returning r.endpoint_id, r.event_id, e.shard, r.tenant_id, r.type_id, r.key_id, r.sequence, r.replay_id, r.attempt
)
insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence, replay_id, attempt)
select endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence, replay_id, attempt from taken
