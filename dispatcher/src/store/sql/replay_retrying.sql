-- Makes up to $9 deliveries of one endpoint that wait for their next attempt due now; they keep their position in the order.
-- The deleted row is the guard. Those that this replay has attempted before it was cancelled and resumed are left alone.
-- $1 endpoint, $2 after this event, $3 from this event, $4 below this event, $5 when the replay was requested, $6 type,
-- $7 reason, $8 failure, $9 limit, $10 replay id, $11 the most attempts a delivery may have.
-- Returns how many were queued, the last event read, and whether none is left.
with e as (
    select id, shard from postrider.endpoints where id = $1
),
picked as materialized (
    select d.event_id from e cross join lateral (
        select d.event_id from postrider.retries d
        where d.endpoint_id = e.id and d.event_id > $2 and d.event_id >= $3 and d.event_id < $4
          and ($6::int is null or d.type_id = $6)
          and $5::timestamptz is not null and $7::text is null and $8::smallint is null
          and d.attempt < $11 and d.replay_id is distinct from $10
        order by d.event_id limit $9) d
),
taken as (
    delete from postrider.retries r using picked p, e
    where r.endpoint_id = e.id and r.event_id = p.event_id
    returning r.event_id, r.tenant_id, r.type_id, r.key_id, r.sequence, r.attempt, r.due_at, r.step, r.replay_id
),
queued as (
    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence, replay_id, attempt,
                                 was_source, was_at, was_step, was_replay)
    select e.id, t.event_id, e.shard, t.tenant_id, t.type_id, t.key_id, t.sequence, $10, t.attempt,
           'retrying', t.due_at, t.step, t.replay_id
    from taken t, e
)
select (select count(*) from taken) as moved,
       (select event_id from picked order by event_id desc limit 1) as last,
       (select count(*) from picked) < $9 as exhausted
