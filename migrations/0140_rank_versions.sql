-- Which version of a type is the newest is said by the versions' names, so that it is the same however and whenever they
-- were published. And which versions were ever emitted is noted, to tell an endpoint that its pinned one is left behind.

-- Sorts as versions do: digits that stand together are a number, everything else is compared character by character.
-- A number is written with its count of digits before it; the name itself at the end leaves no two versions alike.
create function postrider.version_rank(version text) returns text language sql immutable strict as $$
    select string_agg(
        case when p.part[1] ~ '^[0-9]'
             then lpad(length(ltrim(p.part[1], '0'))::text, 2, '0') || ltrim(p.part[1], '0')
             else p.part[1] end, '' order by p.n) || ' ' || version
    from regexp_matches(version, '[0-9]+|[^0-9]+', 'g') with ordinality as p (part, n)
$$;
revoke all on function postrider.version_rank from public;

alter table postrider.schemas
    add column rank text collate "C" generated always as (postrider.version_rank(version)) stored;
create unique index schemas_rank on postrider.schemas (type_id, rank);

-- Whether an event was ever emitted with it. Whoever emits the first one sets it, without waiting for another transaction
-- that is about to; in every later emit it is one more column of a row that is read anyhow. A transaction with one snapshot
-- for all its statements leaves it to others: it would fail where another was first.
alter table postrider.schemas add column emitted boolean not null default false;
-- Of what was emitted before, the latest says enough.
update postrider.schemas s set emitted = true
where s.id in (select e.schema_id from (select schema_id from postrider.events order by id desc limit 100000) e);

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

-- A batch of plain events is one statement and not one function call each: a quarter of the cost.
-- Plain is: no id and no ordering key, which would have to be taken one after the other, and nothing to refuse. When any
-- event without id and key is not plain, none of them is emitted here: all go the long way, which says why.
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

-- The schema that an emit of this type and version means now.
create or replace function postrider.find_schema(type text, version text) returns table (id int, version_found text, schema text)
language sql stable security definer set search_path = pg_catalog, postrider, pg_temp as $$
    select s.id, s.version, s.schema::text
    from postrider.event_types y join postrider.schemas s on s.type_id = y.id
    where y.name = find_schema.type and y.deleted_at is null
      and (find_schema.version is null or s.version = find_schema.version)
    order by s.rank desc limit 1
$$;

-- Where the functions that producers call belong to a role of their own, it needs the right to the new column.
do $$
begin
    if exists (select from pg_roles where rolname = 'postrider_emit') then
        grant update (emitted) on postrider.schemas to postrider_emit;
    end if;
end $$;
