-- Emit: stores the event and one queue row for each subscribed endpoint, in the caller's own transaction.
--
--   emit         one event from SQL              raises refusals    public
--   emit_batch   many events of one tenant       raises refusals    public
--   emit_all     many events of any tenant       returns refusals   for postrider-sender, the API and the relay
--     emit_set   events without id and ordering key, in one statement
--     emit_one   everything else, one event at a time
--   find_schema  the schema that an emit would use
--
-- Refusals are values below `emit` and `emit_batch`, so that a refused event does not abort the transaction of the others.
-- Only the functions that producers call set a search path and run with their owner's rights: doing so costs more than
-- most of the helpers, and it would keep the SQL ones from being inlined.

-- Emits one event and returns its id. `traceparent` and `tracestate` are W3C trace context headers; invalid ones are
-- ignored, because an event must not be lost for them.
create or replace function postrider.emit(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null,
    traceparent text default null, tracestate text default null
) returns text language plpgsql
security definer set search_path = pg_catalog, postrider, pg_temp as $$
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
security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    v_row    record;
    v_done   postrider.emission;
    v_set    int;
    v_before bigint;
    v_many   boolean := cardinality(types) > 200;
begin
    if cardinality(types) > 1000 then
        raise exception using errcode = 'PR422', message = 'too many events: the limit is 1000 per call', column = 'events';
    end if;
    if lock_timeout_ms is not null then
        perform set_config('lock_timeout', lock_timeout_ms::text, true);
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

    perform pg_current_xact_id();      -- as in `emit_one`
    if current_setting('transaction_isolation') <> 'read committed' then
        perform postrider.reject_stale_snapshot(tenants);
    end if;
    if contexts is null then
        return query
        select * from postrider.emit_set(tenants, types, data, ids, versions, ordering_keys, checked_schemas);
    else
        return query
        with emitted as materialized (
            select * from postrider.emit_set(tenants, types, data, ids, versions, ordering_keys, checked_schemas)
        ),
        traced as (
            insert into postrider.traces (event_id, context)
            select e.event_id, c.context
            from emitted e join unnest(contexts) with ordinality as c (context, n) on c.n = e.position + 1
            where c.context is not null
        )
        select * from emitted;
    end if;
    get diagnostics v_set = row_count;

    -- Every batch takes keys and ids in the same order, so that two batches wait for each other instead of deadlocking.
    -- Events of one key keep the order they were given in.
    if v_set < cardinality(types) then
        for v_row in
            select u.* from unnest(tenants, types, data, ids, versions, ordering_keys, checked_schemas, contexts)
                with ordinality as u (tenant, type, data, id, version, ordering_key, checked_schema, context, n)
            where v_set = 0 or u.id is not null or u.ordering_key is not null
            order by u.tenant, u.ordering_key nulls last, case when u.ordering_key is null then u.id end nulls last, u.n
        loop
            v_done := postrider.emit_one(v_row.tenant, v_row.type, v_row.data, v_row.id, v_row.version,
                                         v_row.ordering_key, v_row.checked_schema, v_row.context);
            v_done.position := v_row.n - 1;
            return next v_done;
        end loop;
    end if;

    if v_many and (select count(*) from postrider.queue q
                   where q.xid = pg_current_xact_id() and q.shard >= 0) - v_before > 100000 then
        raise exception using errcode = 'PR422', column = 'events',
            message = 'these events would create more than 100000 deliveries: send them in smaller batches';
    end if;
end $$;

-- Emits the events that have no id and no ordering key in one statement, at a quarter of the cost of a call for each. Ids
-- and keys have to be taken one after the other. If any of these events is thin or would be refused, none is emitted here:
-- `emit_one` then takes them all, and says why.
create or replace function postrider.emit_set(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[], checked_schemas int[]
) returns setof postrider.emission language plpgsql as $$
#variable_conflict use_column
declare
    v_valid boolean;
begin
    -- One exception block for all of them: one for each would cost more than the check.
    begin
        select bool_and(d is not null and octet_length(d) <= 262144 and json_typeof(d::json) = 'object'
                        and postrider.count_brackets(d) <= 128)
        into v_valid from unnest(data) d;
    exception when invalid_text_representation or statement_too_complex then
        v_valid := false;
    end;
    if v_valid is not true then
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
        select k.tenant, k.type, k.version as asked, t.id as tenant_id, y.id as type_id, y.matches, s.id as schema_id,
               s.version, s.emitted
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
        -- Depends on the event, so that each event gets its own instant.
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
        -- Distinct, because the newest version and the same version by name are two kinds of one schema.
        insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
        select t.id, e.event_id, t.shard, e.tenant_id, e.type_id
        from every e join (select distinct * from target) t on t.tenant_id = e.tenant_id and t.schema_id = e.schema_id
    )
    select e.n::int - 1, e.event_id, e.id, e.at, false, null::text, null::text, null::text, e.version, null::bigint
    from every e;
end $$;

-- Emits one event and returns refusals as values. `reserved` allows the operational types of Postrider itself.
create or replace function postrider.emit_one(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null,
    checked_schema int default null, context bytea default null, reserved boolean default false
) returns postrider.emission language plpgsql as $$
declare
    result       postrider.emission;
    v_tenant     int;
    v_type       int;
    v_thin       boolean;
    v_matches    text[];
    v_schema     int;
    v_emitted    boolean;
    v_key        bigint;
    v_data       text := emit_one.data;
    v_full       bytea;
    v_body       bytea;
    v_first      bytea;
    v_first_full bytea;
    v_print      bytea;
    v_at         timestamptz;
begin
    result.duplicate := false;
    -- Assigns the transaction id before the tenant is read: an erasure then either waits for this transaction, or this
    -- transaction sees that the tenant was deleted.
    perform pg_current_xact_id();
    if current_setting('transaction_isolation') <> 'read committed' then
        perform postrider.reject_stale_snapshot(array[emit_one.tenant]);
    end if;

    select t.id, y.id, y.thin, y.matches, s.id, s.version, s.emitted
    into v_tenant, v_type, v_thin, v_matches, v_schema, result.version, v_emitted
    from postrider.tenants t
    left join postrider.event_types y on y.name = emit_one.type and y.deleted_at is null
    left join lateral (
        select s.id, s.version, s.emitted from postrider.schemas s
        where s.type_id = y.id and (emit_one.version is null or s.version = emit_one.version)
        order by s.rank desc limit 1
    ) s on true
    where t.slug = emit_one.tenant and t.deleted_at is null;
    if v_tenant is null then
        result.refusal := 'PR404'; result.field := 'tenant';
        result.message := format('tenant %L not found', left(emit_one.tenant, 64));
        return result;
    end if;
    if emit_one.type like 'postrider.%' and not emit_one.reserved then
        result.refusal := 'PR422'; result.field := 'type';
        result.message := 'event types that start with "postrider." are reserved';
        return result;
    elsif v_type is null then
        result.refusal := 'PR422'; result.field := 'type';
        result.message := format('event type %L not found', left(emit_one.type, 128));
        return result;
    elsif v_schema is null then
        result.refusal := 'PR422'; result.field := 'version';
        result.message := format('event type %L has no version %L', emit_one.type, left(emit_one.version, 64));
        return result;
    elsif v_schema <> emit_one.checked_schema then
        result.refusal := 'PR000'; result.field := 'version';
        result.message := 'a newer version of the type was just published: try again';
        return result;
    end if;

    if emit_one.data is null then
        result.message := 'data must be a JSON object';
    elsif octet_length(emit_one.data) > 262144 then
        result.message := 'data is too large: the limit is 262144 bytes';
    else
        result.message := postrider.data_error(emit_one.data);
    end if;
    if result.message is null and v_thin then
        v_full := convert_to(emit_one.data, 'UTF8');
        begin
            v_data := postrider.thin_data(emit_one.data);
        exception when data_exception then
            -- Postgres can't extract values next to \u0000 or half a surrogate pair. The receiver fetches the data anyway.
            v_data := '{}';
        end;
    end if;
    if result.message is not null then
        result.refusal := 'PR422'; result.field := 'data';
        return result;
    end if;
    if emit_one.id !~ '^[A-Za-z0-9_:-]{1,128}$' then
        result.refusal := 'PR422'; result.field := 'id';
        result.message := 'an event id must be 1 to 128 of the characters A-Z a-z 0-9 _ : -';
        return result;
    end if;
    if emit_one.ordering_key = '' or octet_length(emit_one.ordering_key) > 255 then
        result.refusal := 'PR422'; result.field := 'ordering_key';
        result.message := 'an ordering key must be 1 to 255 bytes';
        return result;
    end if;

    -- clock_timestamp(), not now(): a transaction that began yesterday must not write into yesterday's partition.
    v_at := clock_timestamp();
    result.event_id := postrider.uuid_at(v_at);
    result.created_at := date_trunc('milliseconds', v_at);
    result.id := coalesce(emit_one.id, 'evt_' || replace(result.event_id::text, '-', ''));

    if emit_one.id is not null then
        -- An id of the form that Postrider generates may name an event that was emitted without one.
        if emit_one.id ~ '^evt_[0-9a-f]{32}$' then
            select e.id, e.body, e.full_data, postrider.uuid_time(e.id), e.sequence
            into result.event_id, v_first, v_first_full, result.created_at, result.sequence
            from postrider.events e
            where e.id = substring(emit_one.id from 5)::uuid and e.tenant_id = v_tenant and e.chosen_id is null;
            if found then
                v_body := postrider.compose_body(result.id, emit_one.type, result.created_at, result.version,
                                                 result.sequence, v_data);
                if v_body is distinct from v_first or v_full is distinct from v_first_full then
                    result.refusal := 'PR409'; result.field := 'id';
                    result.message := format('an event with id %L but different content already exists', emit_one.id);
                end if;
                result.duplicate := true;
                return result;
            end if;
            result.event_id := postrider.uuid_at(v_at);
            result.created_at := date_trunc('milliseconds', v_at);
        end if;

        v_print := sha256(convert_to(json_build_array(
            emit_one.type, emit_one.data, emit_one.version, emit_one.ordering_key)::text, 'UTF8'));
        -- Waits for another transaction that emits the same id until that one has ended.
        insert into postrider.event_ids (tenant_id, id, event_id, fingerprint)
        values (v_tenant, emit_one.id, result.event_id, v_print)
        on conflict do nothing;
        if not found then
            select i.event_id, i.fingerprint into result.event_id, v_first
            from postrider.event_ids i where i.tenant_id = v_tenant and i.id = emit_one.id;
            result.created_at := postrider.uuid_time(result.event_id);
            result.duplicate := true;
            if v_first is distinct from v_print then
                result.refusal := 'PR409'; result.field := 'id';
                result.message := format('an event with id %L but different content already exists', emit_one.id);
            end if;
            return result;
        end if;
    end if;

    if emit_one.ordering_key is not null then
        -- The row of the key stays locked until the commit, so that sequences have no gaps and commit in order.
        insert into postrider.ordering_keys as k (tenant_id, key, sequence) values (v_tenant, emit_one.ordering_key, 1)
        on conflict (tenant_id, key) do update set sequence = k.sequence + 1
        returning k.id, k.sequence into v_key, result.sequence;
    end if;

    v_body := postrider.compose_body(result.id, emit_one.type, result.created_at, result.version, result.sequence, v_data);
    insert into postrider.events (id, tenant_id, type_id, schema_id, chosen_id, ordering_key, sequence, body, full_data)
    values (result.event_id, v_tenant, v_type, v_schema, emit_one.id, emit_one.ordering_key, result.sequence,
            v_body, v_full);
    if not v_emitted and current_setting('transaction_isolation') = 'read committed' then
        update postrider.schemas set emitted = true
        where schemas.id = (select s.id from postrider.schemas s where s.id = v_schema and not s.emitted
                            for no key update skip locked);
    end if;
    if emit_one.context is not null then
        insert into postrider.traces (event_id, context) values (result.event_id, emit_one.context);
    end if;

    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence)
    select e.id, result.event_id, e.shard, v_tenant, v_type, v_key, result.sequence
    from postrider.endpoints e
    where e.tenant_id = v_tenant and e.state in ('active', 'paused') and e.types && v_matches
      and (e.versions is null or coalesce(e.versions ->> emit_one.type, result.version) = result.version);
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

-- Null if the text is a JSON object within the depth limit, otherwise the error.
-- Parsed as json, never as jsonb, which rejects \u0000 and reorders keys.
create or replace function postrider.data_error(data text) returns text language plpgsql immutable as $$
declare
    brackets text;
begin
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

-- Opening brackets: an upper bound of the depth. `translate` would take twenty times as long.
create or replace function postrider.count_brackets(data text) returns int language sql immutable as $$
    select octet_length(data) - octet_length(replace(replace(data, '[', ''), '{', ''))
$$;

-- The data of a thin body: `object`, `id` and `type` as they were written, if they are strings or numbers.
create or replace function postrider.thin_data(data text) returns text language sql immutable as $$
    select '{' || coalesce(string_agg(to_json(k.name)::text || ':' || (data::json -> k.name)::text, ',' order by k.n), '') || '}'
    from unnest(array['object', 'id', 'type']) with ordinality as k (name, n)
    where json_typeof(data::json -> k.name) in ('string', 'number') and octet_length((data::json -> k.name)::text) <= 512
$$;

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
