-- An erasure is over when no transaction can emit for its tenant any more. Whoever emits has a transaction number before it
-- reads the tenant. `barrier` is the first number that was not given out when the job began, after the deletion was
-- committed: when every transaction below it has ended, none is left that saw the tenant. One that began before the deletion
-- with a single snapshot for all its statements would see the tenant for ever: it is refused.
alter table postrider.erasures add column barrier xid8;
-- Whether `total` is all of it: a request counts only so far, the job the rest.
alter table postrider.erasures add column counted boolean not null default true;

-- Fails with 40001 when one of these tenants was changed after the transaction's snapshot was taken. The lock is given up at
-- once, with the subtransaction: nobody has to wait for a producer who leaves its transaction open.
create function postrider.refuse_stale(slugs text[]) returns void language plpgsql as $$
begin
    perform from postrider.tenants t where t.slug = any(slugs) and t.deleted_at is null for share;
    raise exception using errcode = 'PR001';
exception when sqlstate 'PR001' then
    null;
end $$;
revoke all on function postrider.refuse_stale from public;

-- The work of every emit. `checked_schema` is the schema that the caller has checked the data against: 0 when it knew of
-- none, null when it checks none. Refusals are values, so that many emits can share one transaction.
create or replace function postrider.emit_against(
    tenant text, type text, data text, id text, version text, ordering_key text, reserved boolean, checked_schema int
) returns postrider.emission language plpgsql as $$
declare
    result      postrider.emission;
    v_tenant    int;
    v_type      int;
    v_thin      boolean;
    v_matches   text[];
    v_schema    int;
    v_emitted   boolean;
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
    -- The transaction has its number before the tenant is read: an erasure then waits for it, or the tenant is seen as deleted.
    perform pg_current_xact_id();
    if current_setting('transaction_isolation') <> 'read committed' then
        perform postrider.refuse_stale(array[emit_against.tenant]);
    end if;

    select t.id, y.id, y.thin, y.matches, s.id, s.version, s.emitted
    into v_tenant, v_type, v_thin, v_matches, v_schema, result.version, v_emitted
    from postrider.tenants t
    left join postrider.event_types y on y.name = emit_against.type and y.deleted_at is null
    left join lateral (
        select s.id, s.version, s.emitted from postrider.schemas s
        where s.type_id = y.id and (emit_against.version is null or s.version = emit_against.version)
        order by s.rank desc limit 1
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
        v_full := convert_to(emit_against.data, 'UTF8');
        begin
            v_data := postrider.thin_data(emit_against.data);
        exception when data_exception then
            -- A \u0000 or half of a surrogate pair, which Postgres can't read values beside. The receiver asks for the rest.
            v_data := '{}';
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
    if not v_emitted and current_setting('transaction_isolation') = 'read committed' then
        update postrider.schemas set emitted = true
        where schemas.id = (select s.id from postrider.schemas s where s.id = v_schema and not s.emitted
                            for no key update skip locked);
    end if;

    insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence)
    select e.id, result.event_id, e.shard, v_tenant, v_type, v_key, result.sequence
    from postrider.endpoints e
    where e.tenant_id = v_tenant and e.state in ('active', 'paused') and e.types && v_matches
      and (e.versions is null or coalesce(e.versions ->> emit_against.type, result.version) = result.version);
    return result;
end $$;

-- Many events, each with its own answer, at the position it was given at.
create or replace function postrider.emit_all(
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
    -- 200 events to the 500 endpoints that a tenant may have are the most that is allowed: fewer need no counting. Nor do
    -- more where the endpoints are few: a transaction of many batches would count all it made before with each of them.
    if v_many then
        select cardinality(types) * coalesce(max(e.count), 0) > 100000 into v_many
        from (select count(*) from postrider.tenants t join postrider.endpoints e on e.tenant_id = t.id
              where t.slug = any(tenants) and e.state in ('active', 'paused')
              group by t.id) e;
    end if;
    if v_many then
        select count(*) into v_before from postrider.queue q where q.xid = pg_current_xact_id() and q.shard >= 0;
    end if;

    -- As in `emit_against`.
    perform pg_current_xact_id();
    if current_setting('transaction_isolation') <> 'read committed' then
        perform postrider.refuse_stale(tenants);
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

    if v_many and (select count(*) from postrider.queue q
                   where q.xid = pg_current_xact_id() and q.shard >= 0) - v_before > 100000 then
        raise exception using errcode = 'PR422', column = 'events',
            message = 'these events would make more than 100000 deliveries: send them in smaller batches';
    end if;
end $$;
