with tenant as materialized (
    select id, slug, row_number() over (order by id) as number from postrider.tenants
    where slug like 'seed-%' and deleted_at is null
), schema as materialized (
    select s.id, s.type_id, y.name, row_number() over (order by y.id) as number
    from postrider.schemas s join postrider.event_types y on y.id = s.type_id
    where y.name like 'seed.%' and y.deleted_at is null
), event as (
    insert into postrider.events (id, tenant_id, type_id, schema_id, body)
    select postrider.uuid_at(clock_timestamp() - interval '24 hours' * (1 - n::float8 / $3)), t.id, s.type_id, s.id,
           convert_to('{"id":"evt","type":"' || s.name || '","data":{"object":"seed","number":' || n || '}}', 'UTF8')
    from generate_series($1 + 1, $2) n
    join tenant t on t.number = 1 + n % $4
    join schema s on s.number = 1 + n % 3
    returning id, tenant_id, type_id
), delivery as materialized (
    select v.id as event_id, e.id as endpoint_id, v.tenant_id, v.type_id, e.shard, e.state, random() as luck,
           random() as speed, postrider.uuid_time(v.id) as at, e.id = max(e.id) over (partition by v.id) as is_last
    from event v join postrider.endpoints e on e.tenant_id = v.tenant_id
), waiting as (
    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
    select endpoint_id, event_id, shard, tenant_id, type_id from delivery where state = 'paused' and luck < 0.15
), retrying as (
    insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, attempt, step, due_at)
    select endpoint_id, event_id, tenant_id, type_id, 1, 1, clock_timestamp() + interval '1 hour'
    from delivery where state = 'paused' and luck >= 0.15 and luck < 0.25
), attempt as (
    insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms, outcome,
                                    status, signature, response_head, final)
    select event_id, endpoint_id, 1, tenant_id, type_id, at, (10 * exp(3 * speed))::int + (speed > 0.99)::int * 900,
           1 + is_bad::int, case when is_bad then 500 else 204 end, 't=1,v1=seed', 'HTTP/1.1',
           case when state = 'paused' and luck < 0.25 then null
                when is_bad then 'dead' else 'delivered' end::postrider.final_state
    from (select *, (is_last and luck < 0.02) or (state = 'paused' and luck < 0.25) as is_bad from delivery) d
    where not (state = 'paused' and luck < 0.15)
    returning event_id, endpoint_id, tenant_id, type_id, final, started_at
), dead as (
    insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, failure, attempt, died_at)
    select endpoint_id, event_id, tenant_id, type_id, 'exhausted', 500, 1, started_at from attempt where final = 'dead'
    returning endpoint_id, type_id, reason, failure, tenant_id
)
insert into postrider.dead_letter_counts as c (endpoint_id, type_id, reason, failure, tenant_id, count)
select endpoint_id, type_id, reason, failure, tenant_id, count(*) from dead group by 1, 2, 3, 4, 5
on conflict (endpoint_id, type_id, reason, failure) do update set count = c.count + excluded.count
