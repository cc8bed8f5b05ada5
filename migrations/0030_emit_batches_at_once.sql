-- A batch of plain events is one statement and not one function call each: a third of the cost.
-- Plain is: no id and no ordering key, which would have to be taken one after the other, and nothing to refuse. Whatever
-- else a batch holds goes the long way, which says why.
create function postrider.emit_plain(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[], checked_schemas int[]
) returns table ("position" int, event_id uuid, created_at timestamptz, version text) language sql as $$
    with plain as materialized (
        select g.n, g.type, g.data, t.id as tenant_id, y.id as type_id, y.matches, s.id as schema_id, s.version,
               postrider.uuid_at(c.at) as event_id, date_trunc('milliseconds', c.at) as at
        from unnest(tenants, types, data, ids, versions, ordering_keys, checked_schemas)
            with ordinality as g (tenant, type, data, id, version, ordering_key, checked_schema, n)
        join postrider.tenants t on t.slug = g.tenant and t.deleted_at is null
        join postrider.event_types y on y.name = g.type and y.deleted_at is null and not y.thin
        cross join lateral (
            select s.id, s.version from postrider.schemas s
            where s.type_id = y.id and (g.version is null or s.version = g.version)
            order by s.id desc limit 1
        ) s
        -- For each event its own instant: it depends on the event, so that it is not taken once for all.
        cross join lateral (select clock_timestamp() as at where g.n > 0 offset 0) c
        where g.id is null and g.ordering_key is null and g.type not like 'postrider.%'
          and (g.checked_schema is null or g.checked_schema = s.id)
          and octet_length(g.data) <= 262144 and postrider.refuse_data(g.data) is null
    ),
    stored as (
        insert into postrider.events (id, tenant_id, type_id, schema_id, body)
        select p.event_id, p.tenant_id, p.type_id, p.schema_id,
               postrider.compose_body('evt_' || replace(p.event_id::text, '-', ''), p.type, p.at, p.version, null, p.data)
        from plain p
    ),
    queued as (
        insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
        select e.id, p.event_id, e.shard, p.tenant_id, p.type_id
        from plain p join postrider.endpoints e on e.tenant_id = p.tenant_id
        where e.state in ('active', 'paused') and e.types && p.matches
          and (e.versions is null or coalesce(e.versions ->> p.type, p.version) = p.version)
    )
    select p.n::int - 1, p.event_id, p.at, p.version from plain p
$$;

create or replace function postrider.emit_all(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[], checked_schemas int[]
) returns table (
    "position" int, event_id uuid, id text, created_at timestamptz, duplicate boolean,
    refusal text, field text, message text, version text, sequence bigint
) language plpgsql security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    v_row    record;
    v_done   postrider.emission;
    v_seen   boolean[];
    v_plain  int := 0;
    v_before bigint;
    v_many   boolean := cardinality(types) > 200;
begin
    if cardinality(types) > 1000 then
        raise exception using errcode = 'PR422', message = 'at most 1000 events are taken in one call', column = 'events';
    end if;
    -- 200 events to the 500 endpoints that a tenant may have are the most that is allowed: fewer need no counting.
    if v_many then
        select count(*) into v_before from postrider.queue q where q.xid = pg_current_xact_id();
    end if;

    duplicate := false;
    for v_row in
        select * from postrider.emit_plain(tenants, types, data, ids, versions, ordering_keys, checked_schemas)
    loop
        "position" := v_row.position;
        event_id := v_row.event_id; id := 'evt_' || replace(v_row.event_id::text, '-', '');
        created_at := v_row.created_at; version := v_row.version;
        v_seen[v_row.position] := true;
        v_plain := v_plain + 1;
        return next;
    end loop;

    -- Keys and ids are taken in one order whoever emits, so that two batches wait for each other and do not deadlock; the
    -- events of one key keep the order they came in.
    if v_plain < cardinality(types) then
        for v_row in
            select u.* from unnest(tenants, types, data, ids, versions, ordering_keys, checked_schemas)
                with ordinality as u (tenant, type, data, id, version, ordering_key, checked_schema, n)
            where v_seen[u.n - 1] is null
            order by u.tenant, u.ordering_key nulls last, case when u.ordering_key is null then u.id end nulls last, u.n
        loop
            v_done := postrider.emit_against(v_row.tenant, v_row.type, v_row.data, v_row.id, v_row.version,
                                             v_row.ordering_key, false, v_row.checked_schema);
            "position" := v_row.n - 1;
            event_id := v_done.event_id; id := v_done.id; created_at := v_done.created_at;
            duplicate := v_done.duplicate; refusal := v_done.refusal; field := v_done.field;
            message := v_done.message; version := v_done.version; sequence := v_done.sequence;
            return next;
        end loop;
    end if;

    if v_many and (select count(*) from postrider.queue q where q.xid = pg_current_xact_id()) - v_before > 100000 then
        raise exception using errcode = 'PR422', column = 'events',
            message = 'these events would make more than 100000 deliveries: send them in smaller batches';
    end if;
end $$;

-- Straight to the work, without a function in between.
create or replace function postrider.emit(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null
) returns text language plpgsql
security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    done postrider.emission :=
        postrider.emit_against(tenant, type, data, id, version, ordering_key, false, null);
begin
    if done.refusal is not null then
        raise exception using errcode = done.refusal, message = done.message, column = done.field;
    end if;
    return done.id;
end $$;

revoke all on function postrider.emit_plain from public;
do $$
begin
    if (select rolsuper from pg_roles where rolname = current_user) then
        grant execute on function postrider.emit_plain to postrider_emit;
    end if;
end $$;
