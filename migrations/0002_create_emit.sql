-- Emit: the event and one queue row for each subscribed endpoint, in the caller's own transaction.
-- `emit_event` does the work and answers refusals as values, so that many emits can share one transaction;
-- `emit` is what producers call and raises them. Both are replaced whole by a migration that changes them.

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
    if length(data) - length(translate(data, '[{', '')) > 128 then
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

create type postrider.emitted as (
    event_id   uuid,
    id         text,
    created_at timestamptz,
    duplicate  boolean,
    refusal    text,         -- an SQLSTATE, or null
    field      text,         -- the argument that was refused
    message    text
);

-- `reserved` is for events that Postrider itself emits: their types begin with `postrider.`.
create function postrider.emit_event(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null,
    reserved boolean default false
) returns postrider.emitted language plpgsql as $$
declare
    result      postrider.emitted;
    v_tenant    int;
    v_type      int;
    v_matches   text[];
    v_schema    int;
    v_version   text;
    v_key       bigint;
    v_sequence  bigint;
    v_body      bytea;
    v_first     bytea;
    v_print     bytea;
    v_at        timestamptz;
begin
    result.duplicate := false;

    select t.id, y.id, y.matches, s.id, s.version into v_tenant, v_type, v_matches, v_schema, v_version
    from postrider.tenants t
    left join postrider.event_types y on y.name = emit_event.type and y.deleted_at is null
    left join lateral (
        select s.id, s.version from postrider.schemas s
        where s.type_id = y.id and (emit_event.version is null or s.version = emit_event.version)
        order by s.id desc limit 1
    ) s on true
    where t.slug = emit_event.tenant and t.deleted_at is null;
    if v_tenant is null then
        result.refusal := 'PR404'; result.field := 'tenant';
        result.message := format('there is no tenant %L', left(emit_event.tenant, 64));
        return result;
    end if;

    if emit_event.type like 'postrider.%' and not emit_event.reserved then
        result.refusal := 'PR422'; result.field := 'type';
        result.message := 'event types that begin with postrider. are reserved';
        return result;
    end if;
    if v_type is null then
        result.refusal := 'PR422'; result.field := 'type';
        result.message := format('there is no event type %L', left(emit_event.type, 128));
        return result;
    elsif v_schema is null then
        result.refusal := 'PR422'; result.field := 'version';
        result.message := format('event type %L has no version %L', emit_event.type, left(emit_event.version, 64));
        return result;
    end if;

    if emit_event.data is null then
        result.message := 'data must be a JSON object';
    elsif octet_length(emit_event.data) > 262144 then
        result.message := 'the event is too large: at most 262144 bytes';
    else
        result.message := postrider.refuse_data(emit_event.data);
    end if;
    if result.message is not null then
        result.refusal := 'PR422'; result.field := 'data';
        return result;
    end if;
    if emit_event.id !~ '^[A-Za-z0-9_:-]{1,128}$' then
        result.refusal := 'PR422'; result.field := 'id';
        result.message := 'an event id is 1 to 128 of the characters A-Z a-z 0-9 _ : -';
        return result;
    end if;
    if emit_event.ordering_key = '' or octet_length(emit_event.ordering_key) > 255 then
        result.refusal := 'PR422'; result.field := 'ordering_key';
        result.message := 'an ordering key is 1 to 255 bytes';
        return result;
    end if;

    -- clock_timestamp and not now(): a transaction begun yesterday must not write into yesterday's partition.
    v_at := clock_timestamp();
    result.event_id := postrider.uuid_at(v_at);
    result.created_at := date_trunc('milliseconds', v_at);
    result.id := coalesce(emit_event.id, 'evt_' || replace(result.event_id::text, '-', ''));

    if emit_event.id is not null then
        -- An id of the form that Postrider makes may name an event that was emitted without one.
        if emit_event.id ~ '^evt_[0-9a-f]{32}$' then
            select e.id, e.body, postrider.uuid_time(e.id), e.sequence
            into result.event_id, v_first, result.created_at, v_sequence
            from postrider.events e
            where e.id = substring(emit_event.id from 5)::uuid and e.tenant_id = v_tenant and e.chosen_id is null;
            if found then
                v_body := postrider.compose_body(result.id, emit_event.type, result.created_at, v_version,
                                                 v_sequence, emit_event.data);
                if v_body is distinct from v_first then
                    result.refusal := 'PR409'; result.field := 'id';
                    result.message := format('event id %L was used before with other content', emit_event.id);
                end if;
                result.duplicate := true;
                return result;
            end if;
            result.event_id := postrider.uuid_at(v_at);
            result.created_at := date_trunc('milliseconds', v_at);
        end if;

        v_print := sha256(convert_to(json_build_array(
            emit_event.type, emit_event.data, emit_event.version, emit_event.ordering_key)::text, 'UTF8'));
        -- Waits for another transaction that emits the same id, until that one has ended.
        insert into postrider.event_ids (tenant_id, id, event_id, fingerprint)
        values (v_tenant, emit_event.id, result.event_id, v_print)
        on conflict do nothing;
        if not found then
            select i.event_id, i.fingerprint into result.event_id, v_first
            from postrider.event_ids i where i.tenant_id = v_tenant and i.id = emit_event.id;
            result.created_at := postrider.uuid_time(result.event_id);
            result.duplicate := true;
            if v_first is distinct from v_print then
                result.refusal := 'PR409'; result.field := 'id';
                result.message := format('event id %L was used before with other content', emit_event.id);
            end if;
            return result;
        end if;
    end if;

    if emit_event.ordering_key is not null then
        -- The lock on the key's row holds until the commit, so that sequences have no gap and commit in order.
        insert into postrider.ordering_keys as k (tenant_id, key, sequence) values (v_tenant, emit_event.ordering_key, 1)
        on conflict (tenant_id, key) do update set sequence = k.sequence + 1
        returning k.id, k.sequence into v_key, v_sequence;
    end if;

    v_body := postrider.compose_body(result.id, emit_event.type, result.created_at, v_version, v_sequence,
                                     emit_event.data);
    insert into postrider.events (id, tenant_id, type_id, schema_id, chosen_id, ordering_key, sequence, body)
    values (result.event_id, v_tenant, v_type, v_schema, emit_event.id, emit_event.ordering_key, v_sequence, v_body);

    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence)
    select e.id, result.event_id, e.shard, v_tenant, v_type, v_key, v_sequence
    from postrider.endpoints e
    where e.tenant_id = v_tenant and e.state in ('active', 'paused') and e.types && v_matches
      and (e.versions is null or coalesce(e.versions ->> emit_event.type, v_version) = v_version);
    return result;
end $$;

create function postrider.emit(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null
) returns text language plpgsql
security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    result postrider.emitted := postrider.emit_event(tenant, type, data, id, version, ordering_key);
begin
    if result.refusal is not null then
        raise exception using errcode = result.refusal, message = result.message, column = result.field;
    end if;
    return result.id;
end $$;

revoke all on all functions in schema postrider from public;

-- A security definer function runs with its owner's rights. Where the schema is made by a superuser, emit goes to a
-- role that has just the rights it needs.
do $$
begin
    if (select rolsuper from pg_roles where rolname = current_user) then
        if not exists (select from pg_roles where rolname = 'postrider_emit') then
            create role postrider_emit nologin;
        end if;
        grant usage, create on schema postrider to postrider_emit;
        grant select on postrider.tenants, postrider.event_types, postrider.schemas, postrider.endpoints to postrider_emit;
        grant select, insert on postrider.events, postrider.event_ids to postrider_emit;
        grant insert on postrider.queue to postrider_emit;
        grant select, insert, update on postrider.ordering_keys to postrider_emit;
        grant execute on all functions in schema postrider to postrider_emit;
        alter function postrider.emit owner to postrider_emit;
        revoke create on schema postrider from postrider_emit;
    end if;
end $$;
