-- Discards up to $8 dead letters of one endpoint: they are no longer dead letters, and their last attempt says what became of
-- them. The deleted row is the guard.
-- $1 endpoint, $2 from this event, $3 up to this event, $4 died by this time, or null, $5 type, $6 reason, $7 failure, $8 limit, $9 number of the
-- last attempt, or null for any. Returns how many were discarded, and whether none were left to pick: a concurrent request may
-- have taken the picked ones.
with picked as materialized (
    select d.event_id from postrider.dead_letters d
    where d.endpoint_id = $1 and d.event_id between $2 and $3 and ($4::timestamptz is null or d.died_at <= $4)
      and ($5::int is null or d.type_id = $5)
      and ($6::text is null or d.reason = $6::postrider.dead_reason)
      and ($7::smallint is null or d.failure = $7)
      and ($9::smallint is null or d.attempt = $9)
    order by d.event_id limit $8
),
discarded as (
    delete from postrider.dead_letters d using picked p
    where d.endpoint_id = $1 and d.event_id = p.event_id
    returning d.event_id, d.type_id, d.reason, d.failure, d.attempt
),
uncounted as (
    update postrider.dead_letter_counts n set count = n.count - x.count
    from (select type_id, reason, failure, count(*) from discarded group by 1, 2, 3) x
    where n.endpoint_id = $1 and n.type_id = x.type_id and n.reason = x.reason and n.failure = x.failure
),
marked as (
    update postrider.attempts a set final = 'discarded' from discarded x
    where a.event_id = x.event_id and a.endpoint_id = $1 and a.number = x.attempt
),
marked_archived as (
    update postrider.archived_attempts a set final = 'discarded' from discarded x
    where a.event_id = x.event_id and a.endpoint_id = $1 and a.number = x.attempt
)
select (select count(*) from discarded) as discarded, (select count(*) from picked) < $8 as is_exhausted
