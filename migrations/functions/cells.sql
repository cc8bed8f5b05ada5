-- Cells: which tenants this database serves.

-- Also fires where a subscription applies what was changed at home.
create or replace function postrider.find_home() returns trigger language plpgsql as $$
declare
    v_lives_here boolean := new.cell_id = (select c.id from postrider.this_cell c);
begin
    new.is_here := v_lives_here and not new.moving;
    -- Events are counted where they are stored.
    if not v_lives_here or new.emits_per_minute is null and new.stored_bytes_max is null then
        new.usage_since := null;
        new.usage_measured := false;
    else
        new.usage_since := coalesce(new.usage_since, clock_timestamp());
    end if;
    return new;
end $$;

create or replace trigger tenants_home before insert or update on postrider.tenants
    for each row execute function postrider.find_home();
alter table postrider.tenants enable always trigger tenants_home;

-- A tenant that was paused or resumed at home: dispatchers of its cell find its endpoints by the transaction that changed them. The
-- triggers of `endpoints` do not fire where a subscription applies a change.
create or replace function postrider.apply_pause() returns trigger language plpgsql as $$
begin
    update postrider.endpoints e set xid = pg_current_xact_id() where e.tenant_id = new.id and e.state <> 'deleted';
    if found and not pg_catalog.pg_try_advisory_xact_lock_shared(postrider.wake_lock()) then
        perform pg_catalog.pg_notify('postrider', '');
    end if;
    return null;
end $$;

create or replace trigger tenants_pause after update on postrider.tenants
    for each row when (old.paused_at is distinct from new.paused_at) execute function postrider.apply_pause();
alter table postrider.tenants enable replica trigger tenants_pause;

-- Emits one event of a tenant that is not here: at home it goes into the outbox, in the caller's transaction. `emit_one` has found
-- the tenant, where it lives (null: it is moving), and the version. A cell refuses such an event, except an operational one, which its
-- relay carries home.
create or replace function postrider.emit_away(
    tenant_id int, cell_id smallint, tenant text, type text, data text, id text, version text, ordering_key text, context bytea,
    found_version text, reserved boolean
) returns postrider.emission language plpgsql as $$
declare
    result    postrider.emission;
    v_at      timestamptz := clock_timestamp();
    v_cell    smallint;
    v_lives   smallint;
    v_is_here boolean := false;
    v_refusal text;
begin
    select c.id, q.refusal into v_cell, v_refusal
    from postrider.this_cell c left join postrider.cell_quotas_used q on q.tenant_id = emit_away.tenant_id and q.until > v_at;
    if v_cell <> 0 and not reserved then
        return postrider.refuse_elsewhere(0, tenant);
    elsif v_refusal is not null and not reserved then
        return postrider.refuse(0, case v_refusal when 'PR429' then 9 else 10 end, tenant, type, version, null);
    elsif v_cell = 0 then
        perform postrider.lock_whereabouts(array[emit_away.tenant]);
        select t.is_here, case when not t.moving then t.cell_id end into v_is_here, v_lives
        from postrider.tenants t where t.id = emit_away.tenant_id;
    end if;
    if v_is_here then
        return postrider.emit_again(emit_away.tenant, emit_away.type, emit_away.data, emit_away.id, emit_away.version,
                                    emit_away.ordering_key, emit_away.context, emit_away.found_version, emit_away.reserved);
    end if;
    if emit_away.ordering_key is not null then
        insert into postrider.cell_outbox_keys (tenant_id, key) values (emit_away.tenant_id, emit_away.ordering_key)
        on conflict do nothing;
        if not found then
            perform from postrider.cell_outbox_keys k
            where k.tenant_id = emit_away.tenant_id and k.key = emit_away.ordering_key for no key update;
        end if;
    end if;
    result.event_id := postrider.uuid_at(v_at);
    result.id := coalesce(emit_away.id, postrider.relayed_id(result.event_id));
    -- Numbered after the lock, so that the events of a key are numbered in the order of their commits.
    insert into postrider.cell_outbox
        (tenant_id, cell_id, type, data, id, is_chosen, version, ordering_key, context, created_at)
    values (emit_away.tenant_id, case when v_cell <> 0 then 0 else v_lives end, emit_away.type, emit_away.data,
            result.id, emit_away.id is not null, emit_away.version, emit_away.ordering_key, emit_away.context, v_at)
    on conflict do nothing;
    if not found then
        return postrider.emit_again(emit_away.tenant, emit_away.type, emit_away.data, emit_away.id, emit_away.version,
                                    emit_away.ordering_key, emit_away.context, emit_away.found_version, emit_away.reserved);
    end if;
    result.position := 0;
    result.duplicate := false;
    result.created_at := date_trunc('milliseconds', v_at);
    result.version := emit_away.found_version;
    return result;
end $$;

-- The same for several events. The arguments are as in `emit_set`, and valid; `found_versions` and `schema_ids` are what the
-- events' versions were found to be, `positions` those of the results.
create or replace function postrider.emit_elsewhere(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[], contexts bytea[],
    found_versions text[], schema_ids int[], positions int[]
) returns postrider.emission[] language plpgsql as $$
#variable_conflict use_column
declare
    v_cell    smallint := (select c.id from postrider.this_cell c);
    v_numbers bigint[];
    v_done    postrider.emission[];
    v_one     postrider.emission;
begin
    if v_cell <> 0 then
        return array(select postrider.refuse_elsewhere(g.position, g.tenant)
                     from unnest(tenants, positions) with ordinality as g (tenant, position, n) order by g.n);
    end if;
    perform postrider.lock_whereabouts(tenants);
    perform postrider.lock_outbox_keys(tenants, ordering_keys);
    -- After the locks, so that the events of a key are numbered in the order of their commits.
    v_numbers := array(select nextval('postrider.cell_outbox_n') from generate_subscripts(tenants, 1));

    with owner as materialized (
        select d.tenant, t.id, t.is_here, case when not t.moving then t.cell_id end as cell_id, q.refusal
        from (select distinct u.tenant from unnest(tenants) as u (tenant)) d
        cross join lateral (
            select t.id, t.is_here, t.cell_id, t.moving from postrider.tenants t
            where t.slug = d.tenant and t.deleted_at is null limit 1
        ) t
        left join lateral (
            select q.refusal from postrider.cell_quotas_used q
            where q.tenant_id = t.id and q.until > clock_timestamp() limit 1
        ) q on true
    ),
    given as materialized (
        select g.*, v_numbers[g.i] as n, o.id as tenant_id, o.is_here, o.cell_id, o.refusal,
               postrider.uuid_at(clock_timestamp()) as event_id
        from unnest(tenants, types, data, ids, versions, ordering_keys, contexts, found_versions, positions) with ordinality
            as g (tenant, type, data, id, version, ordering_key, context, found, position, i)
        left join owner o on o.tenant = g.tenant
    ),
    -- In the order of ids, so that two batches wait for each other instead of deadlocking.
    stored as (
        insert into postrider.cell_outbox
            (n, tenant_id, cell_id, type, data, id, is_chosen, version, ordering_key, context)
        select g.n, g.tenant_id, g.cell_id, g.type, g.data, coalesce(g.id, postrider.relayed_id(g.event_id)), g.id is not null,
               g.version, g.ordering_key, g.context
        from given g where not g.is_here and g.refusal is null
        order by g.tenant_id, g.id collate "C", g.n
        on conflict do nothing
        returning n, created_at
    )
    select array_agg(
        case when g.tenant_id is null then postrider.refuse(g.position, 1, g.tenant, g.type, g.version, null)
             when g.refusal = 'PR429' then postrider.refuse(g.position, 9, g.tenant, g.type, g.version, null)
             when g.refusal = 'PR507' then postrider.refuse(g.position, 10, g.tenant, g.type, g.version, null)
             when s.n is not null
             then row(g.position, g.event_id, coalesce(g.id, postrider.relayed_id(g.event_id)),
                      date_trunc('milliseconds', s.created_at), false, null, null, null, g.found, null)::postrider.emission end
        order by g.i)
    into v_done
    from given g left join stored s on s.n = g.n;

    for i in 1..cardinality(v_done) loop
        if (v_done[i]).position is null then
            v_one := postrider.emit_again(tenants[i], types[i], data[i], ids[i], versions[i], ordering_keys[i], contexts[i],
                                          found_versions[i], false);
            v_one.position := positions[i];
            v_done[i] := v_one;
        end if;
    end loop;
    perform postrider.mark_emitted(schema_ids);
    return v_done;
end $$;

-- As `emit_one` does it for what is emitted here.
create or replace function postrider.mark_emitted(schema_ids int[]) returns void language plpgsql as $$
begin
    if current_setting('transaction_isolation') = 'read committed' then
        update postrider.schemas s set emitted = true
        from (select x.id from postrider.schemas x where not x.emitted and x.id = any(schema_ids)
              for no key update skip locked) first
        where s.id = first.id;
    end if;
end $$;

-- An event that did not go into the outbox: its id is there already, or its tenant has come here meanwhile.
create or replace function postrider.emit_again(
    tenant text, type text, data text, id text, version text, ordering_key text, context bytea, found_version text,
    reserved boolean
) returns postrider.emission language plpgsql as $$
declare
    result   postrider.emission;
    v_cell   smallint := (select c.id from postrider.this_cell c);
    v_tenant postrider.tenants;
    v_found  postrider.cell_outbox;
begin
    loop
        select t.* into v_tenant from postrider.tenants t where t.slug = emit_again.tenant and t.deleted_at is null;
        if not found or v_tenant.is_here then
            return postrider.emit_one(emit_again.tenant, emit_again.type, emit_again.data, emit_again.id, emit_again.version,
                                      emit_again.ordering_key, context => emit_again.context, reserved => emit_again.reserved);
        end if;
        insert into postrider.cell_outbox (tenant_id, cell_id, type, data, id, is_chosen, version, ordering_key, context)
        values (v_tenant.id, case when v_cell <> 0 then 0 when not v_tenant.moving then v_tenant.cell_id end, emit_again.type,
                emit_again.data, emit_again.id, true, emit_again.version, emit_again.ordering_key, emit_again.context)
        on conflict do nothing
        returning * into v_found;
        result.duplicate := not found;
        if result.duplicate then
            select o.* into v_found from postrider.cell_outbox o
            where o.tenant_id = v_tenant.id and o.id = emit_again.id and o.is_chosen;
            -- Relayed in the meantime: the cell compares the content.
            continue when not found;
        end if;
        result.id := v_found.id;
        result.version := found_version;
        if (v_found.type, v_found.data, v_found.version, v_found.ordering_key)
           is distinct from (emit_again.type, emit_again.data, emit_again.version, emit_again.ordering_key) then
            result.refusal := 'PR409'; result.field := 'id';
            result.message := format('an event with id %L but different content already exists', emit_again.id);
        else
            result.event_id := postrider.uuid_at(v_found.created_at);
            result.created_at := date_trunc('milliseconds', v_found.created_at);
        end if;
        return result;
    end loop;
end $$;

-- A tenant that comes home must not arrive while a transaction may still add an event to those that wait for it. Shared until the end
-- of the transaction; what is known of the tenant has to be read after it.
create or replace function postrider.lock_whereabouts(tenants text[]) returns void language plpgsql as $$
begin
    perform pg_advisory_xact_lock_shared(postrider.whereabouts_lock(), t.id)
    from (select t.id from postrider.tenants t where t.slug = any(tenants) and t.deleted_at is null order by t.id) t;
    -- It may have arrived while this transaction waited for the lock.
    if current_setting('transaction_isolation') <> 'read committed' then
        perform postrider.reject_stale_snapshot(tenants);
    end if;
end $$;

create or replace function postrider.whereabouts_lock() returns int language sql immutable as 'select 1886876014';

-- Until the end of the transaction. In order, so that two batches wait for each other instead of deadlocking.
create or replace function postrider.lock_outbox_keys(tenants text[], ordering_keys text[]) returns void language plpgsql as $$
begin
    if cardinality(array_remove(ordering_keys, null)) = 0 then
        return;
    end if;
    insert into postrider.cell_outbox_keys (tenant_id, key)
    select t.id, g.key from unnest(tenants, ordering_keys) as g (tenant, key)
    cross join lateral (select t.id from postrider.tenants t where t.slug = g.tenant and t.deleted_at is null limit 1) t
    where g.key is not null
    group by t.id, g.key order by t.id, g.key collate "C"
    on conflict do nothing;
    perform from (
        select t.id as tenant_id, g.key from unnest(tenants, ordering_keys) as g (tenant, key)
        cross join lateral (select t.id from postrider.tenants t where t.slug = g.tenant and t.deleted_at is null limit 1) t
        where g.key is not null
        group by t.id, g.key order by t.id, g.key collate "C"
    ) g
    cross join lateral (
        select from postrider.cell_outbox_keys k where k.tenant_id = g.tenant_id and k.key = g.key for no key update
    ) k;
end $$;

-- The id of an event that is emitted without one, as the producer gets it and its cell will know it.
create or replace function postrider.relayed_id(event_id uuid) returns text language sql immutable as $$
    select 'evt_s' || replace(event_id::text, '-', '')
$$;

create or replace function postrider.refuse_elsewhere("position" int, tenant text) returns postrider.emission
language sql stable as $$
    select row("position", null, null, null, false, 'PR421', 'tenant',
               case when t.moving then format('tenant %L is moving to another cell: emit in the home database', tenant)
                    else format('tenant %L lives in cell %L: emit in the home database', tenant,
                                coalesce((select c.name from postrider.cells c where c.id = t.cell_id), t.cell_id::text)) end,
               null, null)::postrider.emission
    from postrider.tenants t where t.slug = tenant and t.deleted_at is null
$$;

-- Gives this database its part of all ids, so that those of two cells never collide and survive a move. Run before anything is made
-- in a cell; at home, which has the first part, nothing that exists may lie beyond it.
create or replace function postrider.limit_ids(cell smallint) returns void language plpgsql as $$
declare
    v_sequence text;
    v_next     bigint;
    v_first    bigint;
    v_last     bigint;
begin
    for v_sequence, v_next, v_first, v_last in
        select s.name, coalesce(q.last_value + 1, q.start_value), greatest(cell * r.size, 1), (cell + 1) * r.size - 1
        from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attidentity <> ''
        cross join lateral (select case a.atttypid when 'int4'::regtype then 1::bigint << 25 else 1::bigint << 56 end as size) r
        cross join lateral (select pg_get_serial_sequence(c.oid::regclass::text, a.attname) as name) s
        join pg_sequences q on format('%I.%I', q.schemaname, q.sequencename) = s.name
        where c.relnamespace = 'postrider'::regnamespace and c.relkind in ('r', 'p')
        order by c.relname
    loop
        if v_next between v_first and v_last then
            execute format('alter sequence %s minvalue %s maxvalue %s start %s', v_sequence, v_first, v_last, v_first);
        elsif v_next < v_first then
            execute format('alter sequence %s minvalue %s maxvalue %s start %s restart %s',
                           v_sequence, v_first, v_last, v_first, v_first);
        else
            raise exception 'the ids of % have left the part of cell %: the next one is %', v_sequence, cell, v_next;
        end if;
    end loop;
end $$;
