with made as (
    insert into postrider.events (id, tenant_id, type_id, schema_id, body)
    select postrider.uuid_at(clock_timestamp()), t.id, y.id, s.id, convert_to('{"data":' || $4 || '}', 'UTF8')
    from generate_series(1, $1) g
    join postrider.tenants t on t.slug = 't' || ($2 + g % ($3 - $2)),
    postrider.event_types y join postrider.schemas s on s.type_id = y.id
    where y.name = 'bench.ran'
    returning id, tenant_id, type_id
)
insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
select e.id, m.id, e.shard, m.tenant_id, m.type_id
from made m join postrider.endpoints e on e.tenant_id = m.tenant_id
