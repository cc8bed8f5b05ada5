with made as (
    insert into postrider.events (id, tenant_id, type_id, schema_id, body)
    select postrider.uuid_at(clock_timestamp()), t.id, y.id, s.id, convert_to('{"data":' || $3 || '}', 'UTF8')
    from generate_series(1, $1) g
    join postrider.tenants t on t.slug = 't' || $2,
    postrider.event_types y join postrider.schemas s on s.type_id = y.id
    where y.name = 'bench.ran'
    returning id, tenant_id, type_id
), tried as (
    insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                                    outcome, status, final)
    select m.id, e.id, 7, m.tenant_id, m.type_id, clock_timestamp(), 10, 2, 503, 'dead'
    from made m join postrider.endpoints e on e.tenant_id = m.tenant_id
), counted as (
    insert into postrider.dead_letter_counts (endpoint_id, type_id, reason, failure, tenant_id, count)
    select e.id, m.type_id, 'exhausted', 503, m.tenant_id, count(*)
    from made m join postrider.endpoints e on e.tenant_id = m.tenant_id group by 1, 2, 5
)
insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, failure, attempt)
select e.id, m.id, m.tenant_id, m.type_id, 'exhausted', 503, 7
from made m join postrider.endpoints e on e.tenant_id = m.tenant_id
