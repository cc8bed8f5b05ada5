-- Emit: the event and one queue row for each subscribed endpoint, in the caller's own transaction.
-- `emit_against` does the work and answers refusals as values, so that many emits can share one transaction;
-- `emit` and `emit_batch` are what producers call and raise them. A migration that changes one replaces it whole.

-- Only `emit`, which producers call, has a search path and rights of its own: setting them costs more than most of what
-- these functions do, and without that the short ones are inlined.

-- Version 7, with the microseconds in the bits after the version: ids of one session sort as they were made.
create function postrider.uuid_at(at timestamptz) returns uuid language sql volatile as $$
    select encode(
        int8send(
            (((date_part('epoch', at) * 1000000)::bigint / 1000) << 16) | (7 << 12)
            | ((date_part('epoch', at) * 1000000)::bigint % 1000 * 4096 / 1000))
            || substring(uuid_send(gen_random_uuid()) from 9),
        'hex')::uuid
$$;

-- The first id of an instant: partition bounds and time filters.
create function postrider.uuid_floor(at timestamptz) returns uuid language sql immutable as $$
    select (encode(int8send((extract(epoch from at) * 1000)::bigint << 16), 'hex') || '0000000000000000')::uuid
$$;

create function postrider.uuid_time(id uuid) returns timestamptz language sql immutable as $$
    select timestamptz 'epoch'
        + ('x0000' || substring(encode(uuid_send(id), 'hex') for 12))::bit(64)::bigint * interval '1 millisecond'
$$;

-- Opening ones: as deep as that the text may be nested. `translate` would take twenty times as long.
create function postrider.count_brackets(data text) returns int language sql immutable as $$
    select octet_length(data) - octet_length(replace(replace(data, '[', ''), '{', ''))
$$;

-- Null when the text is a JSON object within the depth limit, otherwise what is wrong with it.
-- Checked as json and never as jsonb, which refuses \u0000 and reorders keys.
create function postrider.refuse_data(data text) returns text language plpgsql immutable as $$
declare
    brackets text;
begin
    begin
        if json_typeof(data::json) <> 'object' then
            return 'data must be a JSON object';
        end if;
    exception
        when statement_too_complex then return 'data is nested too deep: at most 128 levels';
        when others then return 'data is not valid JSON';
    end;
    -- Few values have this many brackets, and only those are measured: what is left of the text when all but its
    -- brackets is gone loses exactly one level with each pass.
    if postrider.count_brackets(data) > 128 then
        brackets := regexp_replace(regexp_replace(data, '"([^"\\]|\\.)*"', '', 'g'), '[^][{}]', '', 'g');
        for level in 1..128 loop
            exit when brackets = '';
            brackets := regexp_replace(brackets, '\[\]|\{\}', '', 'g');
        end loop;
        if brackets <> '' then
            return 'data is nested too deep: at most 128 levels';
        end if;
    end if;
    return null;
end $$;

-- `data` goes in as it was given. The other values need no escaping: their forms allow no quote.
create function postrider.compose_body(id text, type text, at timestamptz, version text, sequence bigint, data text)
returns bytea language sql stable as $$
    select convert_to(
        '{"id":"' || id || '","type":"' || type
        || '","created_at":"' || to_char(at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
        || '","api_version":"' || version || '",'
        || coalesce('"sequence":' || sequence || ',', '')
        || '"data":' || data || '}', 'UTF8')
$$;

create type postrider.emission as (
    event_id   uuid,
    id         text,
    created_at timestamptz,
    duplicate  boolean,
    refusal    text,         -- an SQLSTATE, or null. PR000: the data was checked against another schema
    field      text,
    message    text,
    version    text,
    sequence   bigint
);

-- What a thin body says of its object: `object`, `id` and `type` as they were written, where they are words or numbers.
create function postrider.thin_data(data text) returns text language sql immutable as $$
    select '{' || coalesce(string_agg(to_json(k.name)::text || ':' || (data::json -> k.name)::text, ',' order by k.n), '') || '}'
    from unnest(array['object', 'id', 'type']) with ordinality as k (name, n)
    where json_typeof(data::json -> k.name) in ('string', 'number') and octet_length((data::json -> k.name)::text) <= 512
$$;

-- The work of every emit. `checked_schema` is the schema that the caller has checked the data against: 0 when it knew of
-- none, null when it checks none. Refusals are values, so that many emits can share one transaction.
create function postrider.emit_against(
    tenant text, type text, data text, id text, version text, ordering_key text, reserved boolean, checked_schema int
) returns postrider.emission language plpgsql as $$
declare
    result      postrider.emission;
    v_tenant    int;
    v_type      int;
    v_thin      boolean;
    v_matches   text[];
    v_schema    int;
    v_key       bigint;
    v_data      text := emit_against.data;
    v_full      bytea;
    v_body      bytea;
    v_first     bytea;
    v_first_full bytea;
    v_print     bytea;
    v_at        timestamptz;
begin
    result.duplicate := false;

    select t.id, y.id, y.thin, y.matches, s.id, s.version
    into v_tenant, v_type, v_thin, v_matches, v_schema, result.version
    from postrider.tenants t
    left join postrider.event_types y on y.name = emit_against.type and y.deleted_at is null
    left join lateral (
        select s.id, s.version from postrider.schemas s
        where s.type_id = y.id and (emit_against.version is null or s.version = emit_against.version)
        order by s.id desc limit 1
    ) s on true
    where t.slug = emit_against.tenant and t.deleted_at is null;
    if v_tenant is null then
        result.refusal := 'PR404'; result.field := 'tenant';
        result.message := format('there is no tenant %L', left(emit_against.tenant, 64));
        return result;
    end if;
    if emit_against.type like 'postrider.%' and not emit_against.reserved then
        result.refusal := 'PR422'; result.field := 'type';
        result.message := 'event types that begin with postrider. are reserved';
        return result;
    elsif v_type is null then
        result.refusal := 'PR422'; result.field := 'type';
        result.message := format('there is no event type %L', left(emit_against.type, 128));
        return result;
    elsif v_schema is null then
        result.refusal := 'PR422'; result.field := 'version';
        result.message := format('event type %L has no version %L', emit_against.type, left(emit_against.version, 64));
        return result;
    elsif v_schema <> emit_against.checked_schema then
        result.refusal := 'PR000'; result.field := 'version';
        result.message := 'the newest version of the type has changed just now: try again';
        return result;
    end if;

    if emit_against.data is null then
        result.message := 'data must be a JSON object';
    elsif octet_length(emit_against.data) > 262144 then
        result.message := 'the event is too large: at most 262144 bytes';
    else
        result.message := postrider.refuse_data(emit_against.data);
    end if;
    if result.message is null and v_thin then
        begin
            v_data := postrider.thin_data(emit_against.data);
            v_full := convert_to(emit_against.data, 'UTF8');
        exception when data_exception then
            result.message := 'the data of a thin type can hold no \u0000 and no half of a surrogate pair';
        end;
    end if;
    if result.message is not null then
        result.refusal := 'PR422'; result.field := 'data';
        return result;
    end if;
    if emit_against.id !~ '^[A-Za-z0-9_:-]{1,128}$' then
        result.refusal := 'PR422'; result.field := 'id';
        result.message := 'an event id is 1 to 128 of the characters A-Z a-z 0-9 _ : -';
        return result;
    end if;
    if emit_against.ordering_key = '' or octet_length(emit_against.ordering_key) > 255 then
        result.refusal := 'PR422'; result.field := 'ordering_key';
        result.message := 'an ordering key is 1 to 255 bytes';
        return result;
    end if;

    -- clock_timestamp and not now(): a transaction begun yesterday must not write into yesterday's partition.
    v_at := clock_timestamp();
    result.event_id := postrider.uuid_at(v_at);
    result.created_at := date_trunc('milliseconds', v_at);
    result.id := coalesce(emit_against.id, 'evt_' || replace(result.event_id::text, '-', ''));

    if emit_against.id is not null then
        -- An id of the form that Postrider makes may name an event that was emitted without one.
        if emit_against.id ~ '^evt_[0-9a-f]{32}$' then
            select e.id, e.body, e.full_data, postrider.uuid_time(e.id), e.sequence
            into result.event_id, v_first, v_first_full, result.created_at, result.sequence
            from postrider.events e
            where e.id = substring(emit_against.id from 5)::uuid and e.tenant_id = v_tenant and e.chosen_id is null;
            if found then
                v_body := postrider.compose_body(result.id, emit_against.type, result.created_at, result.version,
                                                 result.sequence, v_data);
                if v_body is distinct from v_first or v_full is distinct from v_first_full then
                    result.refusal := 'PR409'; result.field := 'id';
                    result.message := format('event id %L was used before with other content', emit_against.id);
                end if;
                result.duplicate := true;
                return result;
            end if;
            result.event_id := postrider.uuid_at(v_at);
            result.created_at := date_trunc('milliseconds', v_at);
        end if;

        v_print := sha256(convert_to(json_build_array(
            emit_against.type, emit_against.data, emit_against.version, emit_against.ordering_key)::text, 'UTF8'));
        -- Waits for another transaction that emits the same id, until that one has ended.
        insert into postrider.event_ids (tenant_id, id, event_id, fingerprint)
        values (v_tenant, emit_against.id, result.event_id, v_print)
        on conflict do nothing;
        if not found then
            select i.event_id, i.fingerprint into result.event_id, v_first
            from postrider.event_ids i where i.tenant_id = v_tenant and i.id = emit_against.id;
            result.created_at := postrider.uuid_time(result.event_id);
            result.duplicate := true;
            if v_first is distinct from v_print then
                result.refusal := 'PR409'; result.field := 'id';
                result.message := format('event id %L was used before with other content', emit_against.id);
            end if;
            return result;
        end if;
    end if;

    if emit_against.ordering_key is not null then
        -- The lock on the key's row holds until the commit, so that sequences have no gap and commit in order.
        insert into postrider.ordering_keys as k (tenant_id, key, sequence) values (v_tenant, emit_against.ordering_key, 1)
        on conflict (tenant_id, key) do update set sequence = k.sequence + 1
        returning k.id, k.sequence into v_key, result.sequence;
    end if;

    v_body := postrider.compose_body(result.id, emit_against.type, result.created_at, result.version, result.sequence,
                                     v_data);
    insert into postrider.events (id, tenant_id, type_id, schema_id, chosen_id, ordering_key, sequence, body, full_data)
    values (result.event_id, v_tenant, v_type, v_schema, emit_against.id, emit_against.ordering_key, result.sequence,
            v_body, v_full);

    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence)
    select e.id, result.event_id, e.shard, v_tenant, v_type, v_key, result.sequence
    from postrider.endpoints e
    where e.tenant_id = v_tenant and e.state in ('active', 'paused') and e.types && v_matches
      and (e.versions is null or coalesce(e.versions ->> emit_against.type, result.version) = result.version);
    return result;
end $$;

create function postrider.emit(
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

-- For events that Postrider itself emits: their types begin with `postrider.`.
create function postrider.emit_event(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null,
    reserved boolean default false
) returns postrider.emission language sql as $$
    select postrider.emit_against(tenant, type, data, id, version, ordering_key, reserved, null)
$$;

-- A batch of plain events is one statement and not one function call each: a quarter of the cost.
-- Plain is: no id and no ordering key, which would have to be taken one after the other, and nothing to refuse. When any
-- event without id and key is not plain, none of them is emitted here: all go the long way, which says why.
create function postrider.emit_plain(
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
        select bool_and(octet_length(d) <= 262144 and json_typeof(d::json) = 'object' and postrider.count_brackets(d) <= 128)
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
        select k.tenant, k.type, k.version as asked, t.id as tenant_id, y.id as type_id, y.matches, s.id as schema_id, s.version
        from (select distinct tenant, type, version from given) k
        join postrider.tenants t on t.slug = k.tenant and t.deleted_at is null
        join postrider.event_types y on y.name = k.type and y.deleted_at is null and not y.thin
        cross join lateral (
            select s.id, s.version from postrider.schemas s
            where s.type_id = y.id and (k.version is null or s.version = k.version)
            order by s.id desc limit 1
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

-- Many events, each with its own answer, at the position it was given at.
create function postrider.emit_all(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[], checked_schemas int[]
) returns table (
    "position" int, event_id uuid, id text, created_at timestamptz, duplicate boolean,
    refusal text, field text, message text, version text, sequence bigint
) language plpgsql security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    v_row    record;
    v_done   postrider.emission;
    v_plain  int;
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

    return query select * from postrider.emit_plain(tenants, types, data, ids, versions, ordering_keys, checked_schemas);
    get diagnostics v_plain = row_count;

    -- Keys and ids are taken in one order whoever emits, so that two batches wait for each other and do not deadlock; the
    -- events of one key keep the order they came in.
    if v_plain < cardinality(types) then
        for v_row in
            select u.* from unnest(tenants, types, data, ids, versions, ordering_keys, checked_schemas)
                with ordinality as u (tenant, type, data, id, version, ordering_key, checked_schema, n)
            where v_plain = 0 or u.id is not null or u.ordering_key is not null
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

-- For requests that arrive together and share a transaction: none of them may wait long for a stranger's.
create function postrider.emit_group(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[], checked_schemas int[]
) returns table (
    "position" int, event_id uuid, id text, created_at timestamptz, duplicate boolean,
    refusal text, field text, message text, version text, sequence bigint
) language plpgsql set lock_timeout = '100ms' as $$
begin
    return query select * from postrider.emit_all(tenants, types, data, ids, versions, ordering_keys, checked_schemas);
end $$;

create function postrider.raise_refusal(refusal text, field text, message text) returns text language plpgsql as $$
begin
    raise exception using errcode = refusal, message = message, column = field;
end $$;

-- Many events of one tenant from SQL, all or none; answers their ids in the order given.
create function postrider.emit_batch(
    tenant text, types text[], data text[],
    ids text[] default null, versions text[] default null, ordering_keys text[] default null
) returns setof text language plpgsql
security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    v_count int := coalesce(cardinality(types), 0);
begin
    if coalesce(cardinality(data), 0) <> v_count or coalesce(cardinality(ids), v_count) <> v_count
       or coalesce(cardinality(versions), v_count) <> v_count or coalesce(cardinality(ordering_keys), v_count) <> v_count then
        raise exception using errcode = 'PR422', message = 'the lists of a batch are of one length', column = 'events';
    end if;
    return query
    select case when e.refusal is null then e.id
                else postrider.raise_refusal(e.refusal, e.field, format('event %s: %s', e.position, e.message)) end
    from postrider.emit_all(array_fill(tenant, array[v_count]), types, data, ids, versions, ordering_keys, null) e
    order by e.position;
end $$;

-- The schema that an emit of this type and version means now.
create function postrider.find_schema(type text, version text) returns table (id int, version_found text, schema text)
language sql stable security definer set search_path = pg_catalog, postrider, pg_temp as $$
    select s.id, s.version, s.schema::text
    from postrider.event_types y join postrider.schemas s on s.type_id = y.id
    where y.name = find_schema.type and y.deleted_at is null
      and (find_schema.version is null or s.version = find_schema.version)
    order by s.id desc limit 1
$$;

revoke all on all functions in schema postrider from public;

-- A security definer function runs with its owner's rights. Where the schema is made by a superuser, those that producers
-- call go to a role that has just the rights it needs.
do $$
begin
    if (select rolsuper from pg_roles where rolname = current_user) then
        if not exists (select from pg_roles where rolname = 'postrider_emit') then
            create role postrider_emit nologin;
        end if;
        grant usage, create on schema postrider to postrider_emit;
        grant select on postrider.tenants, postrider.event_types, postrider.schemas, postrider.endpoints to postrider_emit;
        grant select, insert on postrider.events, postrider.event_ids, postrider.queue to postrider_emit;
        grant select, insert, update on postrider.ordering_keys to postrider_emit;
        grant execute on all functions in schema postrider to postrider_emit;
        alter function postrider.emit owner to postrider_emit;
        alter function postrider.emit_all owner to postrider_emit;
        alter function postrider.emit_batch owner to postrider_emit;
        alter function postrider.find_schema owner to postrider_emit;
        revoke create on schema postrider from postrider_emit;
    end if;
end $$;
