-- `emit_plain` as it was, but a list of data with NULL in it is not plain: `bool_and` passes over NULL, and the event failed on
-- a column's constraint. It goes the long way now, which refuses it by its position.
create or replace function postrider.emit_plain(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[], checked_schemas int[]
) returns table (
    "position" int, event_id uuid, id text, created_at timestamptz, duplicate boolean,
    refusal text, field text, message text, version text, sequence bigint
) language plpgsql as $$
#variable_conflict use_column
declare
    v_fine boolean;
begin
    -- One exception block for all of them: one each would cost more than the check.
    begin
        select bool_and(d is not null and octet_length(d) <= 262144 and json_typeof(d::json) = 'object'
                        and postrider.count_brackets(d) <= 128)
        into v_fine from unnest(data) d;
    exception when invalid_text_representation or statement_too_complex then
        v_fine := false;
    end;
    if v_fine is not true then
        return;
    end if;
    return query
    with given as materialized (
        select g.* from unnest(tenants, types, data, ids, versions, ordering_keys, checked_schemas)
            with ordinality as g (tenant, type, data, id, version, ordering_key, checked_schema, n)
        where g.id is null and g.ordering_key is null
    ),
    -- What many events have in common is looked up once.
    kind as materialized (
        select k.tenant, k.type, k.version as asked, t.id as tenant_id, y.id as type_id, y.matches, s.id as schema_id, s.version, s.emitted
        from (select distinct tenant, type, version from given) k
        join postrider.tenants t on t.slug = k.tenant and t.deleted_at is null
        join postrider.event_types y on y.name = k.type and y.deleted_at is null and not y.thin
        cross join lateral (
            select s.id, s.version, s.emitted from postrider.schemas s
            where s.type_id = y.id and (k.version is null or s.version = k.version)
            order by s.rank desc limit 1
        ) s
        where k.type not like 'postrider.%'
    ),
    target as materialized (
        select k.tenant_id, k.schema_id, e.id, e.shard
        from kind k join postrider.endpoints e on e.tenant_id = k.tenant_id
        where e.state in ('active', 'paused') and e.types && k.matches
          and (e.versions is null or coalesce(e.versions ->> k.type, k.version) = k.version)
    ),
    plain as materialized (
        select g.n, g.data, k.*, postrider.uuid_at(c.at) as event_id, date_trunc('milliseconds', c.at) as at
        from given g
        join kind k on k.tenant = g.tenant and k.type = g.type
            and coalesce(k.asked, '') = coalesce(g.version, '') and (k.asked is null) = (g.version is null)
        -- For each event its own instant: it depends on the event, so that it is not taken once for all.
        cross join lateral (select clock_timestamp() as at where g.n > 0 offset 0) c
        where g.checked_schema is null or g.checked_schema = k.schema_id
    ),
    every as materialized (
        select p.*, 'evt_' || replace(p.event_id::text, '-', '') as id
        from plain p where (select count(*) from plain) = (select count(*) from given)
    ),
    stored as (
        insert into postrider.events (id, tenant_id, type_id, schema_id, body)
        select e.event_id, e.tenant_id, e.type_id, e.schema_id,
               postrider.compose_body(e.id, e.type, e.at, e.version, null, e.data)
        from every e
    ),
    marked as (
        update postrider.schemas s set emitted = true
        from (select x.id from postrider.schemas x
              where current_setting('transaction_isolation') = 'read committed'
                and not x.emitted and x.id in (select e.schema_id from every e where not e.emitted)
              for no key update skip locked) first
        where s.id = first.id
    ),
    queued as (
        -- An event asked for as the newest version and one asked for by that version's name are of two kinds, and of one
        -- schema: the targets are looked up without doubles.
        insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
        select t.id, e.event_id, t.shard, e.tenant_id, e.type_id
        from every e join (select distinct * from target) t on t.tenant_id = e.tenant_id and t.schema_id = e.schema_id
    )
    select e.n::int - 1, e.event_id, e.id, e.at, false, null::text, null::text, null::text, e.version, null::bigint
    from every e;
end $$;
