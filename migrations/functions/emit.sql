-- Emit: stores the event and one queue row for each subscribed endpoint, in the caller's own transaction.
--
--   emit         one event from SQL              raises refusals    public
--   emit_batch   many events of one tenant       raises refusals    public
--   emit_all     many events of any tenant       returns refusals   for postrider-sender, the API and the relay
--     emit_set   several, in one statement
--     emit_one   one: the statement for several costs as much as two or three of these
--   find_schema  the schema that an emit would use
--
-- Events of a tenant that lives in another cell go into the outbox: `emit_away` and `emit_elsewhere` in cells.sql.
--
-- Refusals are values below `emit` and `emit_batch`, so that a refused event does not abort the transaction of the others.
-- Only the functions that producers call set a search path and run with their owner's rights: doing so costs more than
-- most of the helpers, and it would keep the SQL ones from being inlined. The other settings there cost nothing more and
-- make plans the same whatever the statistics say: a plan is made once in a session, and never scans a table.

-- Emits one event and returns its id. `traceparent` and `tracestate` are W3C trace context headers; invalid ones are
-- ignored, because an event must not be lost for them.
create or replace function postrider.emit(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null,
    traceparent text default null, tracestate text default null
) returns text language plpgsql
security definer set search_path = pg_catalog, postrider, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
    v_done postrider.emission :=
        postrider.emit_one(tenant, type, data, id, version, ordering_key,
                           context => postrider.trace_context(traceparent, tracestate));
begin
    if v_done.refusal is not null then
        raise exception using errcode = v_done.refusal, message = v_done.message, column = v_done.field;
    end if;
    return v_done.id;
end $$;

-- Emits many events of one tenant, all or none. Returns their ids in the order given.
create or replace function postrider.emit_batch(
    tenant text, types text[], data text[],
    ids text[] default null, versions text[] default null, ordering_keys text[] default null
) returns setof text language plpgsql
security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    v_count int := coalesce(cardinality(types), 0);
begin
    if coalesce(cardinality(data), 0) <> v_count or coalesce(cardinality(ids), v_count) <> v_count
       or coalesce(cardinality(versions), v_count) <> v_count or coalesce(cardinality(ordering_keys), v_count) <> v_count then
        raise exception using errcode = 'PR422', message = 'the arrays of a batch must have the same length',
            column = 'events';
    end if;
    return query
    select case when e.refusal is null then e.id
                else postrider.raise_refusal(e.refusal, e.field, format('event %s: %s', e.position, e.message)) end
    from postrider.emit_all(array_fill(tenant, array[v_count]), types, data, ids, versions, ordering_keys) e
    order by e.position;
end $$;

-- Emits many events and returns one row for each, at the position of its arguments.
-- `checked_schemas` are the schemas the caller has validated the data against: 0 if it knew of none, null if it does not
-- validate. `contexts` are trace contexts as stored in `traces`. `lock_timeout_ms` applies until the end of the
-- transaction: events of several callers that share one must not wait long for someone else's.
create or replace function postrider.emit_all(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[],
    checked_schemas int[] default null, contexts bytea[] default null, lock_timeout_ms int default null
) returns setof postrider.emission language plpgsql
security definer set search_path = pg_catalog, postrider, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
    v_before bigint;
    v_many   boolean := cardinality(types) > 200;
begin
    if cardinality(types) > 1000 then
        raise exception using errcode = 'PR422', message = 'too many events: the limit is 1000 per call', column = 'events';
    end if;
    if lock_timeout_ms is not null then
        perform set_config('lock_timeout', lock_timeout_ms::text, true);
    end if;
    -- A statement for all costs as much as two or three calls for one.
    if cardinality(types) = 1 then
        -- Unnested, because the arrays of a caller may have any lower bound.
        return query
        select e.* from unnest(tenants, types, data, ids, versions, ordering_keys, checked_schemas, contexts)
            as u (tenant, type, data, id, version, ordering_key, checked_schema, context)
        cross join lateral postrider.emit_one(u.tenant, u.type, u.data, u.id, u.version, u.ordering_key, u.checked_schema,
                                              u.context) e;
        return;
    end if;
    -- A tenant may have 500 endpoints, so that 200 events stay within the limit of 100000 deliveries without counting. Nor
    -- is counting needed where there are few endpoints: it would include all earlier batches of the transaction each time.
    if v_many then
        select cardinality(types) * coalesce(max(e.count), 0) > 100000 into v_many
        from (select count(*) from postrider.tenants t join postrider.endpoints e on e.tenant_id = t.id
              where t.slug = any(tenants) and e.state in ('active', 'paused')
              group by t.id) e;
    end if;
    if v_many then
        select count(*) into v_before from postrider.queue q where q.xid = pg_current_xact_id() and q.shard >= 0;
    end if;

    return query
    select * from unnest(postrider.emit_set(tenants, types, data, ids, versions, ordering_keys, checked_schemas, contexts));

    if v_many and (select count(*) from postrider.queue q
                   where q.xid = pg_current_xact_id() and q.shard >= 0) - v_before > 100000 then
        raise exception using errcode = 'PR422', column = 'events',
            message = 'these events would create more than 100000 deliveries: send them in smaller batches';
    end if;
end $$;

-- Emits events in one statement: with ids and ordering keys too, an event costs a quarter of a call of its own.
-- Ids are taken before keys, and both sorted, so that two batches wait for each other instead of deadlocking.
--
-- Nested loops are off because the planner expects ten events and would compare each of a thousand with every other. Where
-- nothing else is possible it uses them all the same, at an estimate that would start the JIT compiler.
create or replace function postrider.emit_set(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[],
    checked_schemas int[], contexts bytea[]
) returns postrider.emission[] language plpgsql
set enable_nestloop = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    v_valid    boolean;
    v_errors   text[];
    v_named    uuid[];
    v_done     postrider.emission[];
    v_repeated boolean;
    v_is_away  boolean;
    v_away     postrider.emission[];
    v_limited  boolean := exists (select from postrider.tenants t
                                  where t.usage_since is not null and t.slug = any(tenants) and t.deleted_at is null);
    v_faults   int[];
begin
    v_valid := pg_current_xact_id() is not null;      -- as in `emit_one`
    if current_setting('transaction_isolation') <> 'read committed' then
        perform postrider.reject_stale_snapshot(tenants);
    end if;
    -- One exception block for all of them: one for each would cost more than the check.
    begin
        select bool_and(postrider.is_plain_object(d)) into v_valid from unnest(data) d;
    exception when invalid_text_representation or statement_too_complex then
        v_valid := false;
    end;
    if v_valid is not true then
        v_errors := array(select postrider.data_error(d.data) from unnest(data) with ordinality as d (data, n) order by d.n);
    end if;
    if array_to_string(ids, ' ') ~ 'evt_[0-9a-f]{32}' then
        v_named := array(select postrider.generated_event(g.tenant, g.id)
                         from unnest(tenants, ids) with ordinality as g (tenant, id, n) order by g.n);
    end if;

    if v_limited then
        v_faults := postrider.quota_faults(tenants, data, ids);
    end if;

    with given as materialized (
        select g.n, coalesce(g.tenant, '') as tenant, coalesce(g.type, '') as type, g.version,
               coalesce('=' || g.version, '') as asked, g.data, g.id, g.ordering_key, g.checked_schema, g.context, g.error,
               g.named, g.quota_fault, clock_timestamp() as at
        from unnest(tenants, types, versions, data, ids, ordering_keys, checked_schemas, contexts, v_errors, v_named, v_faults)
            with ordinality
            as g (tenant, type, version, data, id, ordering_key, checked_schema, context, error, named, quota_fault, n)
    ),
    -- What many events have in common is looked up once.
    kind as materialized (
        select row_number() over () as kind, k.tenant, k.type, k.asked, t.id as tenant_id, t.is_here, y.id as type_id, y.thin,
               y.matches, s.id as schema_id, s.version as found, s.emitted
        from (select distinct tenant, type, asked from given) k
        left join lateral (
            select t.id, t.is_here from postrider.tenants t where t.slug = k.tenant and t.deleted_at is null limit 1
        ) t on true
        left join lateral (
            select y.id, y.thin, y.matches from postrider.event_types y
            where y.name = k.type and y.deleted_at is null limit 1
        ) y on true
        left join lateral (
            select s.id, s.version, s.emitted from postrider.schemas s
            where s.type_id = y.id and (k.asked = '' or s.version = substring(k.asked from 2))
            order by s.rank desc limit 1
        ) s on true
    ),
    judged as materialized (
        select g.*, postrider.uuid_at(g.at) as event_id, k.kind, k.tenant_id, k.type_id, k.thin, k.schema_id, k.found,
               k.emitted,
               coalesce(postrider.find_fault(k.tenant_id, g.type, false, k.type_id, k.schema_id, g.checked_schema, g.error,
                                             g.id, g.ordering_key), g.quota_fault, case when not k.is_here then 11 end) as fault
        from given g join kind k on k.tenant = g.tenant and k.type = g.type and k.asked = g.asked
    ),
    -- Waits for another transaction that emits the same id until that one has ended.
    taken as (
        insert into postrider.event_ids (tenant_id, id, event_id, fingerprint)
        select distinct on (j.tenant_id, j.id collate "C") j.tenant_id, j.id, j.event_id,
               postrider.fingerprint(j.type, j.version, j.ordering_key, j.data)
        from judged j where j.fault is null and j.id is not null and j.named is null
        order by j.tenant_id, j.id collate "C", j.n
        on conflict do nothing
        returning event_id
    ),
    fresh as materialized (
        select j.* from judged j left join taken t on t.event_id = j.event_id
        where j.fault is null and (j.id is null or t.event_id is not null)
    ),
    -- The row of a key stays locked until the commit, so that sequences have no gaps and commit in order.
    counter as (
        insert into postrider.ordering_keys as k (tenant_id, key, sequence)
        select f.tenant_id, f.ordering_key, count(*) from fresh f where f.ordering_key is not null
        group by f.tenant_id, f.ordering_key order by f.tenant_id, f.ordering_key collate "C"
        on conflict (tenant_id, key) do update set sequence = k.sequence + excluded.sequence
        returning k.id, k.tenant_id, k.key, k.sequence
    ),
    -- Events of one key keep the order they were given in.
    numbered as (
        select f.event_id, c.id as key_id,
               c.sequence + 1 - row_number() over (partition by f.tenant_id, f.ordering_key order by f.n desc) as sequence
        from fresh f join counter c on c.tenant_id = f.tenant_id and c.key = f.ordering_key
    ),
    every as materialized (
        select f.*, o.key_id, o.sequence, coalesce(f.id, 'evt_' || replace(f.event_id::text, '-', '')) as public_id
        from fresh f left join numbered o on o.event_id = f.event_id
    ),
    stored as (
        insert into postrider.events (id, tenant_id, type_id, schema_id, chosen_id, ordering_key, sequence, body, full_data)
        select e.event_id, e.tenant_id, e.type_id, e.schema_id, e.id, e.ordering_key, e.sequence,
               postrider.compose_body(e.public_id, e.type, e.at, e.found, e.sequence,
                                      case when e.thin then postrider.thin_data(e.data) else e.data end),
               case when e.thin then convert_to(e.data, 'UTF8') end
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
    traced as (
        insert into postrider.traces (event_id, context)
        select e.event_id, e.context from every e where e.context is not null
    ),
    target as materialized (
        select k.kind, e.id, e.shard
        from kind k
        cross join lateral (
            select e.id, e.shard from postrider.endpoints e
            where e.tenant_id = k.tenant_id and e.state in ('active', 'paused') and e.types && k.matches
              and (e.versions is null or coalesce(e.versions ->> k.type, k.found) = k.found)
            offset 0
        ) e
    ),
    queued as (
        insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence)
        select t.id, e.event_id, t.shard, e.tenant_id, e.type_id, e.key_id, e.sequence
        from every e join target t on t.kind = e.kind
    )
    select array_agg(
               case when j.fault = 11
                    then row(j.n - 1, null, null, null, false, 'PR421', 'tenant', null, j.found, j.schema_id)::postrider.emission
                    when j.fault is not null
                    then postrider.refuse(j.n::int - 1, j.fault, j.tenant, j.type, j.version, j.error)
                    else row(j.n - 1, e.event_id, e.public_id, date_trunc('milliseconds', j.at), e.event_id is null,
                             null, null, null, j.found, e.sequence)::postrider.emission end
               order by j.n),
           bool_or(j.fault is null and e.event_id is null), bool_or(j.fault = 11)
    into v_done, v_repeated, v_is_away
    from judged j left join every e on e.event_id = j.event_id;

    if v_limited then
        perform postrider.count_usage(u.tenant_id, u.emits, u.bytes)
        from (select t.id as tenant_id, count(*) as emits, sum(postrider.counted_bytes(g.data))::bigint as bytes
              from unnest(v_done) d
              join unnest(tenants, data) with ordinality as g (tenant, data, n) on g.n = d.position + 1
              join postrider.tenants t on t.slug = g.tenant and t.deleted_at is null and t.usage_since is not null
              where d.refusal is null and not d.duplicate
              group by t.id order by t.id) u;
    end if;
    if v_repeated then
        v_done := array(
            select case when d.duplicate
                        then postrider.repeat_emission(d.position, g.tenant, g.type, g.data, g.id, g.version, g.ordering_key,
                                                       d.version)
                        else row(d.*)::postrider.emission end
            from unnest(v_done) d
            join unnest(tenants, types, data, ids, versions, ordering_keys) with ordinality
                as g (tenant, type, data, id, version, ordering_key, n) on g.n = d.position + 1
            order by d.position);
    end if;
    if v_is_away then
        select postrider.emit_elsewhere(
                   array_agg(g.tenant order by g.n), array_agg(g.type order by g.n), array_agg(g.data order by g.n),
                   array_agg(g.id order by g.n), array_agg(g.version order by g.n), array_agg(g.ordering_key order by g.n),
                   array_agg(g.context order by g.n), array_agg(d.version order by g.n), array_agg(d.sequence::int order by g.n),
                   array_agg(d.position order by g.n))
        into v_away
        from unnest(v_done) d
        join unnest(tenants, types, data, ids, versions, ordering_keys, contexts) with ordinality
            as g (tenant, type, data, id, version, ordering_key, context, n) on g.n = d.position + 1
        where d.refusal = 'PR421';
        v_done := array(
            select case when e.position is null then row(d.*)::postrider.emission else row(e.*)::postrider.emission end
            from unnest(v_done) d left join unnest(v_away) e on e.position = d.position
            order by d.position);
    end if;
    return v_done;
end $$;

-- Emits one event and returns refusals as values. `reserved` allows the operational types of Postrider itself.
create or replace function postrider.emit_one(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null,
    checked_schema int default null, context bytea default null, reserved boolean default false
) returns postrider.emission language plpgsql as $$
declare
    result    postrider.emission;
    -- Assigns the transaction id before the tenant is read: an erasure then either waits for this transaction, or this
    -- transaction sees that the tenant was deleted.
    v_valid   boolean := pg_current_xact_id() is not null;
    v_error   text;
    v_fault   int;
    v_tenant  int;
    v_type    int;
    v_thin    boolean;
    v_matches text[];
    v_schema  int;
    v_emitted boolean;
    v_limited boolean;
    v_is_here boolean;
    v_cell    smallint;
    v_key     bigint;
    v_at      timestamptz;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform postrider.reject_stale_snapshot(array[emit_one.tenant]);
    end if;
    begin
        v_valid := postrider.is_plain_object(emit_one.data);
    exception when invalid_text_representation or statement_too_complex then
        v_valid := false;
    end;
    if v_valid is not true then
        v_error := postrider.data_error(emit_one.data);
    end if;

    select t.id, t.usage_since is not null, t.is_here, case when not t.moving then t.cell_id end, y.id, y.thin, y.matches, s.id, s.version, s.emitted, clock_timestamp(),
           postrider.find_fault(t.id, emit_one.type, emit_one.reserved, y.id, s.id, emit_one.checked_schema, v_error,
                                emit_one.id, emit_one.ordering_key)
    into v_tenant, v_limited, v_is_here, v_cell, v_type, v_thin, v_matches, v_schema, result.version, v_emitted, v_at, v_fault
    from (select 1) one
    left join postrider.tenants t on t.slug = emit_one.tenant and t.deleted_at is null
    left join postrider.event_types y on y.name = emit_one.type and y.deleted_at is null
    left join lateral (
        select s.id, s.version, s.emitted from postrider.schemas s
        where s.type_id = y.id and (emit_one.version is null or s.version = emit_one.version)
        order by s.rank desc limit 1
    ) s on true;
    if v_fault is null and v_limited and not emit_one.reserved then
        v_fault := postrider.quota_fault(v_tenant, emit_one.data, emit_one.id);
    end if;
    if v_fault is not null then
        return postrider.refuse(0, v_fault, emit_one.tenant, emit_one.type, emit_one.version, v_error);
    end if;
    if not v_is_here then
        if not v_emitted then
            perform postrider.mark_emitted(array[v_schema]);
        end if;
        return postrider.emit_away(v_tenant, v_cell, emit_one.tenant, emit_one.type, emit_one.data, emit_one.id,
                                   emit_one.version, emit_one.ordering_key, emit_one.context, result.version,
                                   emit_one.reserved);
    end if;

    result.event_id := postrider.uuid_at(v_at);
    if emit_one.id is not null then
        if emit_one.id ~ '^evt_[0-9a-f]{32}$' and postrider.generated_event(emit_one.tenant, emit_one.id) is not null then
            return postrider.repeat_emission(0, emit_one.tenant, emit_one.type, emit_one.data, emit_one.id, emit_one.version,
                                             emit_one.ordering_key, result.version);
        end if;
        -- Waits for another transaction that emits the same id until that one has ended.
        insert into postrider.event_ids (tenant_id, id, event_id, fingerprint)
        values (v_tenant, emit_one.id, result.event_id,
                postrider.fingerprint(emit_one.type, emit_one.version, emit_one.ordering_key, emit_one.data))
        on conflict do nothing;
        if not found then
            return postrider.repeat_emission(0, emit_one.tenant, emit_one.type, emit_one.data, emit_one.id, emit_one.version,
                                             emit_one.ordering_key, result.version);
        end if;
    end if;
    if emit_one.ordering_key is not null then
        -- The row of the key stays locked until the commit, so that sequences have no gaps and commit in order.
        insert into postrider.ordering_keys as k (tenant_id, key, sequence) values (v_tenant, emit_one.ordering_key, 1)
        on conflict (tenant_id, key) do update set sequence = k.sequence + 1
        returning k.id, k.sequence into v_key, result.sequence;
    end if;

    result.position := 0;
    result.duplicate := false;
    result.created_at := date_trunc('milliseconds', v_at);
    result.id := coalesce(emit_one.id, 'evt_' || replace(result.event_id::text, '-', ''));
    with stored as (
        insert into postrider.events (id, tenant_id, type_id, schema_id, chosen_id, ordering_key, sequence, body, full_data)
        values (result.event_id, v_tenant, v_type, v_schema, emit_one.id, emit_one.ordering_key, result.sequence,
                postrider.compose_body(result.id, emit_one.type, v_at, result.version, result.sequence,
                                       case when v_thin then postrider.thin_data(emit_one.data) else emit_one.data end),
                case when v_thin then convert_to(emit_one.data, 'UTF8') end)
    )
    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence)
    select e.id, result.event_id, e.shard, v_tenant, v_type, v_key, result.sequence
    from postrider.endpoints e
    where e.tenant_id = v_tenant and e.state in ('active', 'paused') and e.types && v_matches
      and (e.versions is null or coalesce(e.versions ->> emit_one.type, result.version) = result.version);
    if not v_emitted and current_setting('transaction_isolation') = 'read committed' then
        update postrider.schemas set emitted = true
        where schemas.id = (select s.id from postrider.schemas s where s.id = v_schema and not s.emitted
                            for no key update skip locked);
    end if;
    if emit_one.context is not null then
        insert into postrider.traces (event_id, context) values (result.event_id, emit_one.context);
    end if;
    if v_limited then
        perform postrider.count_usage(v_tenant, case when emit_one.reserved then 0 else 1 end,
                                      postrider.counted_bytes(emit_one.data));
    end if;
    return result;
end $$;

-- Why an event can't be emitted; null if it can. `refuse` has the messages.
create or replace function postrider.find_fault(
    tenant_id int, type text, reserved boolean, type_id int, schema_id int, checked_schema int, error text, id text,
    ordering_key text
) returns int language sql immutable as $$
    select case when tenant_id is null then 1
                when type like 'postrider.%' and not reserved then 2
                when type_id is null then 3
                when schema_id is null then 4
                when schema_id <> checked_schema then 5
                when error is not null then 6
                -- With {1,128} in the expression the check would take fifty times as long.
                when id !~ '^[A-Za-z0-9_:-]+$' or octet_length(id) > 128 then 7
                when ordering_key = '' or octet_length(ordering_key) > 255 then 8 end
$$;

create or replace function postrider.refuse("position" int, fault int, tenant text, type text, version text, error text)
returns postrider.emission language sql immutable as $$
    select row("position", null, null, null, false,
        case fault when 1 then 'PR404' when 5 then 'PR000' when 9 then 'PR429' when 10 then 'PR507' else 'PR422' end,
        case fault when 1 then 'tenant' when 2 then 'type' when 3 then 'type' when 4 then 'version' when 5 then 'version'
                   when 6 then 'data' when 7 then 'id' when 8 then 'ordering_key' else 'tenant' end,
        case fault
            when 1 then format('tenant %L not found', left(tenant, 64))
            when 2 then 'event types that start with "postrider." are reserved'
            when 3 then format('event type %L not found', left(type, 128))
            when 4 then format('event type %L has no version %L', type, left(version, 64))
            when 5 then 'a newer version of the type was just published: try again'
            when 6 then error
            when 7 then 'an event id must be 1 to 128 of the characters A-Z a-z 0-9 _ : -'
            when 8 then 'an ordering key must be 1 to 255 bytes'
            when 9 then format('tenant %L has used its quota of emits for this minute', tenant)
            else format('tenant %L has used its quota of stored bytes', tenant) end,
        null, null)::postrider.emission
$$;

-- Of the arguments of an emit. Unambiguous: the ordering key is preceded by its length, and `data` comes last.
create or replace function postrider.fingerprint(type text, version text, ordering_key text, data text) returns bytea
language sql stable as $$
    select substring(sha256(convert_to(
        type || ' ' || coalesce(version, '') || ' ' || coalesce(octet_length(ordering_key), 0) || ' '
        || coalesce(ordering_key, '') || data, 'UTF8')) for 16)
$$;

-- An event that was emitted without an id, by the id that was generated for it.
create or replace function postrider.generated_event(tenant text, id text) returns uuid language sql stable as $$
    select e.id from postrider.tenants t join postrider.events e on e.tenant_id = t.id
    where t.slug = generated_event.tenant and t.deleted_at is null and e.chosen_id is null
      and e.id = case when generated_event.id ~ '^evt_[0-9a-f]{32}$' then substring(generated_event.id from 5)::uuid end
$$;

-- What an emit returns whose id another event already has: that event, or a refusal if its content is different.
create or replace function postrider.repeat_emission(
    "position" int, tenant text, type text, data text, id text, version text, ordering_key text, found_version text
) returns postrider.emission language plpgsql as $$
declare
    result   postrider.emission;
    v_tenant int;
    v_same   boolean;
begin
    result.position := repeat_emission.position;
    result.id := repeat_emission.id;
    result.version := found_version;
    result.duplicate := true;
    select t.id into v_tenant from postrider.tenants t where t.slug = repeat_emission.tenant and t.deleted_at is null;
    select i.event_id, i.fingerprint = postrider.fingerprint(repeat_emission.type, repeat_emission.version,
                                                             repeat_emission.ordering_key, repeat_emission.data)
    into result.event_id, v_same
    from postrider.event_ids i where i.tenant_id = v_tenant and i.id = repeat_emission.id;
    if not found then
        select e.id, e.sequence,
               e.body = postrider.compose_body(
                   repeat_emission.id, repeat_emission.type, postrider.uuid_time(e.id), found_version, e.sequence,
                   case when e.full_data is null then repeat_emission.data else postrider.thin_data(repeat_emission.data) end)
               and (e.full_data is null or e.full_data = convert_to(repeat_emission.data, 'UTF8'))
        into result.event_id, result.sequence, v_same
        from postrider.events e
        where e.tenant_id = v_tenant and e.id = postrider.generated_event(repeat_emission.tenant, repeat_emission.id);
    end if;
    result.created_at := postrider.uuid_time(result.event_id);
    if v_same is not true then
        result.refusal := 'PR409'; result.field := 'id';
        result.message := format('an event with id %L but different content already exists', repeat_emission.id);
    end if;
    return result;
end $$;

-- The schema that an emit of this type and version would use now.
create or replace function postrider.find_schema(type text, version text)
returns table (id int, version_found text, schema text)
language sql stable security definer set search_path = pg_catalog, postrider, pg_temp as $$
    select s.id, s.version, s.schema::text
    from postrider.event_types y join postrider.schemas s on s.type_id = y.id
    where y.name = find_schema.type and y.deleted_at is null
      and (find_schema.version is null or s.version = find_schema.version)
    order by s.rank desc limit 1
$$;

-- Fails with 40001 if one of these tenants was changed after the transaction took its snapshot. The lock is released at
-- once, with the subtransaction: nobody has to wait for a producer that leaves its transaction open.
create or replace function postrider.reject_stale_snapshot(slugs text[]) returns void language plpgsql as $$
begin
    perform from postrider.tenants t where t.slug = any(slugs) and t.deleted_at is null for share;
    raise exception using errcode = 'PR001';
exception when sqlstate 'PR001' then
    null;
end $$;

-- Opening brackets: an upper bound of the depth. `translate` would take twenty times as long.
create or replace function postrider.count_brackets(data text) returns int language sql immutable as $$
    select octet_length(data) - octet_length(replace(replace(data, '[', ''), '{', ''))
$$;

-- Whether the text is a JSON object that needs no closer look. Raises if it is not JSON.
-- Parsed as json, never as jsonb, which rejects \u0000 and reorders keys.
create or replace function postrider.is_plain_object(data text) returns boolean language sql stable as $$
    select data is not null and octet_length(data) <= 262144 and json_typeof(data::json) = 'object'
        and postrider.count_brackets(data) <= 128
$$;

-- Null if the text is a JSON object within the limits of size and depth, otherwise the error.
create or replace function postrider.data_error(data text) returns text language plpgsql immutable as $$
declare
    brackets text;
begin
    if data is null then
        return 'data must be a JSON object';
    elsif octet_length(data) > 262144 then
        return 'data is too large: the limit is 262144 bytes';
    end if;
    begin
        if json_typeof(data::json) <> 'object' then
            return 'data must be a JSON object';
        end if;
    exception
        when statement_too_complex then return 'data is nested too deeply: the limit is 128 levels';
        when others then return 'data is not valid JSON';
    end;
    -- Only data with many brackets needs to be measured. Reduced to its brackets, the text loses exactly one level with
    -- each pass.
    if postrider.count_brackets(data) > 128 then
        brackets := regexp_replace(regexp_replace(data, '"([^"\\]|\\.)*"', '', 'g'), '[^][{}]', '', 'g');
        for level in 1..128 loop
            exit when brackets = '';
            brackets := regexp_replace(brackets, '\[\]|\{\}', '', 'g');
        end loop;
        if brackets <> '' then
            return 'data is nested too deeply: the limit is 128 levels';
        end if;
    end if;
    return null;
end $$;

-- The data of a thin body: `object`, `id` and `type` as they were written, if they are strings or numbers.
create or replace function postrider.thin_data(data text) returns text language plpgsql immutable as $$
begin
    return '{' || coalesce((
        select string_agg(to_json(k.name)::text || ':' || (data::json -> k.name)::text, ',' order by k.n)
        from unnest(array['object', 'id', 'type']) with ordinality as k (name, n)
        where json_typeof(data::json -> k.name) in ('string', 'number')
          and octet_length((data::json -> k.name)::text) <= 512), '') || '}';
exception when data_exception then
    -- Postgres can't extract values next to \u0000 or half a surrogate pair. The receiver fetches the data anyway.
    return '{}';
end $$;

-- The body that every attempt sends. `data` is inserted as it was given. The other values need no escaping: none of them
-- can contain a quote.
create or replace function postrider.compose_body(
    id text, type text, at timestamptz, version text, sequence bigint, data text
) returns bytea language sql stable as $$
    select convert_to(
        '{"id":"' || id || '","type":"' || type
        || '","created_at":"' || to_char(at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
        || '","api_version":"' || version || '",'
        || coalesce('"sequence":' || sequence || ',', '')
        || '"data":' || data || '}', 'UTF8')
$$;

-- Trace context headers as stored in `traces`. Null without a valid traceparent; a tracestate that can't be stored is left
-- out, and its syntax is checked when it is sent.
create or replace function postrider.trace_context(traceparent text, tracestate text) returns bytea language sql stable as $$
    select case when traceparent ~ '^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$' then
        decode(replace(substring(traceparent from 4), '-', ''), 'hex')
        || case when tracestate ~ '^[ -~]+$' and length(tracestate) <= 512 then convert_to(tracestate, 'UTF8') else '' end
    end
$$;

-- Raises inside an expression.
create or replace function postrider.raise_refusal(refusal text, field text, message text) returns text language plpgsql as $$
begin
    raise exception using errcode = refusal, message = message, column = field;
end $$;
