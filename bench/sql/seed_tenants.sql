with tenant as (
    insert into postrider.tenants (slug, name)
    select 'seed-' || n, 'Seeded tenant ' || n from generate_series(1, $1) n
    on conflict (slug) where deleted_at is null do nothing returning id, slug
), type as (
    insert into postrider.event_types (name, matches)
    select name, array['*', 'seed.*', name] from unnest(array['seed.paid', 'seed.refunded', 'seed.shipped']) name
    on conflict (name) where deleted_at is null do nothing returning id
), schema as (
    insert into postrider.schemas (type_id, version, schema) select id, '2026-01-15', '{}' from type
)
insert into postrider.endpoints (tenant_id, public_id, shard, url, types, state)
select t.id, 'ep_' || substring(md5(t.slug || n) for 24), n, 'https://' || t.slug || '.example.com/hook/' || n,
       '{seed.*}', case when n = 1 then 'paused' else 'active' end::postrider.endpoint_state
from tenant t, generate_series(1, $2) n
