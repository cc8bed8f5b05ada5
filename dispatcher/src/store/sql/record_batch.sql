-- Records attempts of any outcome: the delivery moves to delivered, dead or retries, or is dropped by a filter.
-- $1 owner; $2..$22 one array per column of `result`; $23 the most days between two days of failure, $24 days of failure
-- after which an endpoint is disabled, $25 the fewest of them on which an attempt failed.
-- Returns the rows that matched, with the time of the next attempt if there is one.
--
-- Each CTE that takes a row also returns its result, so that nothing is joined twice: the planner can't estimate
-- the size of a CTE, and a second join cost thirty times the rest.
with owned as materialized (
    select s.shard, s.epoch from postrider.shards s
    where s.owner = $1 and s.shard = any($4::smallint[])
    order by s.shard for share
),
result as materialized (
    select i.*, clock_timestamp() + i.wait_ms * interval '1 millisecond' as due_at,
           least(i.number, 32767) as kept_number
    from unnest($2::int[], $3::uuid[], $4::bigint[], $5::bigint[], $6::int[], $7::timestamptz[],
                $8::int[], $9::smallint[], $10::smallint[], $11::text[], $12::text[], $13::text[],
                $14::bytea[], $15::postrider.final_state[], $16::postrider.dead_reason[],
                $17::smallint[], $18::bigint[], $19::bool[], $20::bool[], $21::smallint[], $22::text[])
        as i(endpoint_id, event_id, shard, epoch, number, started_at, duration_ms, outcome, status, error,
             signature, head, body, final, reason, step, wait_ms, filtered, archived, failure, timing)
    where i.shard << 48 | i.epoch = any (array(select o.shard::bigint << 48 | o.epoch from owned o))
),
from_queue as (
    delete from postrider.queue q using result r
    where q.endpoint_id = any (array[r.endpoint_id]) and q.event_id = r.event_id and q.attempt + 1 = r.number
    returning r.*, q.tenant_id, q.type_id, q.key_id, q.sequence, q.replay_id
),
moved as (
    insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, key_id, sequence, replay_id,
                                   attempt, step, due_at)
    select endpoint_id, event_id, tenant_id, type_id, key_id, sequence, replay_id, kept_number, step, due_at
    from from_queue where final is null and not filtered
),
ended as (
    delete from postrider.retries w using result r
    where w.endpoint_id = any (array[r.endpoint_id]) and w.event_id = r.event_id and w.attempt + 1 = r.number
      and (r.final is not null or r.filtered)
    returning r.*, w.tenant_id, w.type_id, w.key_id, w.sequence, w.replay_id
),
again as (
    update postrider.retries w set attempt = r.kept_number, step = r.step, due_at = r.due_at
    from result r
    where w.endpoint_id = any (array[r.endpoint_id]) and w.event_id = r.event_id and w.attempt + 1 = r.number
      and r.final is null and not r.filtered
    returning r.*, w.tenant_id, w.type_id, w.key_id, w.sequence, w.replay_id
),
matched as materialized (
    select * from from_queue union all select * from ended union all select * from again
),
-- On conflict: only the highest number that can be stored comes twice.
attempt as (
    insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                                    outcome, status, error, signature, response_head, response_body,
                                    replay_id, final, timing)
    select event_id, endpoint_id, kept_number, tenant_id, type_id, started_at, duration_ms, outcome, status, error,
           signature, head, body, replay_id, final, timing
    from matched where not filtered and not archived
    on conflict (event_id, endpoint_id, number) do update
        set started_at = excluded.started_at, duration_ms = excluded.duration_ms, outcome = excluded.outcome,
            status = excluded.status, error = excluded.error, signature = excluded.signature,
            response_head = excluded.response_head, response_body = excluded.response_body,
            replay_id = excluded.replay_id, final = excluded.final, timing = excluded.timing
),
archived_attempt as (
    insert into postrider.archived_attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                                         outcome, status, error, signature, response_head, response_body,
                                         replay_id, final, timing)
    select event_id, endpoint_id, kept_number, tenant_id, type_id, started_at, duration_ms, outcome, status, error,
           signature, head, body, replay_id, final, timing
    from matched where not filtered and archived
    on conflict (event_id, endpoint_id, number) do update
        set started_at = excluded.started_at, duration_ms = excluded.duration_ms, outcome = excluded.outcome,
            status = excluded.status, error = excluded.error, signature = excluded.signature,
            response_head = excluded.response_head, response_body = excluded.response_body,
            replay_id = excluded.replay_id, final = excluded.final, timing = excluded.timing
),
dead as (
    insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, failure, attempt, replay_id)
    select endpoint_id, event_id, tenant_id, type_id, reason, failure, kept_number, replay_id from matched where final = 'dead'
),
counted as (
    insert into postrider.dead_letter_counts as c (endpoint_id, type_id, reason, failure, tenant_id, count)
    select endpoint_id, type_id, reason, failure, min(tenant_id), count(*) from matched where final = 'dead'
    group by endpoint_id, type_id, reason, failure
    on conflict (endpoint_id, type_id, reason, failure) do update set count = c.count + excluded.count
),
recovered as (
    delete from postrider.endpoint_health h
    where h.endpoint_id = any (array(select distinct m.endpoint_id from matched m where m.final = 'delivered'))
),
failed as materialized (
    select endpoint_id from matched
    group by endpoint_id
    having bool_or(outcome between 2 and 7) and bool_and(final is distinct from 'delivered')
),
failing as (
    insert into postrider.endpoint_health (endpoint_id) select endpoint_id from failed on conflict do nothing
),
-- Once a day. After a long pause it is unknown whether the endpoint failed all that time: it starts over.
failing_again as (
    update postrider.endpoint_health h
    set failing_since = case when h.last_failed_on < d.today - $23::int then clock_timestamp() else h.failing_since end,
        failed_days = case when h.last_failed_on < d.today - $23::int then 1 else least(h.failed_days + 1, 1000) end,
        last_failed_on = d.today
    from (select (clock_timestamp() at time zone 'UTC')::date as today) d
    where h.endpoint_id = any (array(select f.endpoint_id from failed f)) and h.last_failed_on < d.today
),
-- Reads the rows as they were before this statement.
failing_long as materialized (
    select h.endpoint_id
    from postrider.endpoint_health h, (select (clock_timestamp() at time zone 'UTC')::date as today) d
    where h.endpoint_id = any (array(select f.endpoint_id from failed f))
      and h.failing_since < clock_timestamp() - $24::int * interval '1 day'
      and h.last_failed_on >= d.today - $23::int
      and h.failed_days + (h.last_failed_on < d.today)::int >= $25
),
to_disable as (
    insert into postrider.endpoints_to_disable (endpoint_id, cause)
    select endpoint_id, max(cause)
    from (
        select endpoint_id, 'failing' as cause from failing_long
        union all
        select endpoint_id, 'gone' from matched where status = 410
    ) c
    group by endpoint_id
    on conflict do nothing
)
select m.endpoint_id, m.event_id, case when m.final is null and not m.filtered then m.due_at end as due_at,
       coalesce(m.status = 410, false)
           or exists (select from failing_long l where l.endpoint_id = m.endpoint_id) as disabling
from matched m
