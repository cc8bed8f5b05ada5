-- Returns the queued deliveries of cancelled replays to the state they came from: dead, delivered, retries, or none.
-- A row whose attempt is in flight has a lower number than that attempt and is left alone; one that was queued
-- after it has not.
-- $1 shard, $2 owner, $3 epoch, $4 endpoint, $5 replay ids, $6 events in flight, $7 the numbers of these attempts.
with owned as materialized (
    select s.shard from postrider.shards s where s.shard = $1 and s.owner = $2 and s.epoch = $3 for share
),
existing as materialized (
    select e.id from postrider.endpoints e where e.id = $4 and e.state <> 'deleted' for share
),
taken as (
    delete from postrider.queue q
    where exists (select from owned) and exists (select from existing)
      and q.endpoint_id = $4 and q.replay_id = any($5) and q.was_source is not null
      -- One that was resumed meanwhile goes on.
      and exists (select from postrider.replays c where c.public_id = q.replay_id and c.state = 'cancelled')
      and not exists (select from unnest($6::uuid[], $7::int[]) a (event_id, number)
                      where a.event_id = q.event_id and q.attempt < a.number)
    returning q.*
),
dead as (
    insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, failure, attempt, died_at,
                                        replay_id)
    select endpoint_id, event_id, tenant_id, type_id, was_reason, was_failure, attempt, was_at, was_replay
    from taken where was_source = 'dead'
),
counted as (
    insert into postrider.dead_letter_counts as c (endpoint_id, type_id, reason, failure, tenant_id, count)
    select endpoint_id, type_id, was_reason, was_failure, min(tenant_id), count(*) from taken where was_source = 'dead'
    group by endpoint_id, type_id, was_reason, was_failure
    on conflict (endpoint_id, type_id, reason, failure) do update set count = c.count + excluded.count
),
ended as (
    update postrider.attempts a set final = t.was_source::text::postrider.final_state from taken t
    where a.event_id = t.event_id and a.endpoint_id = t.endpoint_id and a.number = t.attempt
      and t.was_source in ('dead', 'delivered')
),
ended_archived as (
    update postrider.archived_attempts a set final = t.was_source::text::postrider.final_state from taken t
    where a.event_id = t.event_id and a.endpoint_id = t.endpoint_id and a.number = t.attempt
      and t.was_source in ('dead', 'delivered')
),
retrying as (
    insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, key_id, sequence, replay_id, attempt,
                                   step, due_at)
    select endpoint_id, event_id, tenant_id, type_id, key_id, sequence, was_replay, attempt, was_step, was_at
    from taken where was_source = 'retrying'
)
update postrider.replay_parts p set moved = p.moved - t.count, withdrawn_from = least(p.withdrawn_from, t.first)
from (select replay_id, was_source, count(*), (array_agg(event_id order by event_id))[1] as first
      from taken group by replay_id, was_source) t
join postrider.replays r on r.public_id = t.replay_id
where p.replay_id = r.id and p.endpoint_id = $4 and p.source = t.was_source
