-- $1 the tenant, $2 how many. The bodies are not read: their lengths are known without.
with e as materialized (
   select id, type_id, schema_id, octet_length(body) + coalesce(octet_length(full_data), 0) as bytes
   from postrider.events where tenant_id = $1 order by id desc limit $2
)
select e.id, y.name as type_name, s.version, e.bytes
from e join postrider.event_types y on y.id = e.type_id join postrider.schemas s on s.id = e.schema_id
order by e.id desc
