-- The outbox of a producer whose database is not Postrider's own: `emit` with the same form, and a table from which the
-- dispatchers' relay takes what was committed. Tenants, types and versions are known only to the main database: what it
-- refuses ends in `outbox_refused` with the reason.

create table postrider.outbox (
    n            bigint generated always as identity primary key,
    tenant       text not null,
    type         text not null,
    data         text not null,
    id           text not null,
    version      text,
    ordering_key text,
    created_at   timestamptz not null default clock_timestamp(),
    unique (tenant, id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

create table postrider.outbox_refused (
    n            bigint primary key,
    tenant       text not null,
    type         text not null,
    data         text not null,
    id           text not null,
    version      text,
    ordering_key text,
    created_at   timestamptz not null,
    refusal      text not null,           -- PR404, PR409 or PR422
    message      text not null,
    refused_at   timestamptz not null default clock_timestamp()
);

create function postrider.emit(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null
) returns text language plpgsql
security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    v_id    text := coalesce(emit.id, 'evt_s' || replace(gen_random_uuid()::text, '-', ''));
    v_found postrider.outbox;
    v_wrong text;
    v_field text := 'data';
begin
    begin
        if emit.data is null or json_typeof(emit.data::json) <> 'object' then
            v_wrong := 'data must be a JSON object';
        elsif octet_length(emit.data) > 262144 then
            v_wrong := 'the event is too large: at most 262144 bytes';
        end if;
    exception
        when statement_too_complex then v_wrong := 'data is nested too deep: at most 128 levels';
        when others then v_wrong := 'data is not valid JSON';
    end;
    if v_wrong is null and (emit.tenant is null or emit.tenant !~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$') then
        v_field := 'tenant'; v_wrong := 'this is not the id of a tenant';
    elsif v_wrong is null and (emit.type is null or emit.type !~ '^[a-z0-9_]+(\.[a-z0-9_]+)*$'
                               or octet_length(emit.type) > 128 or emit.type like 'postrider.%') then
        v_field := 'type'; v_wrong := 'this is not an event type';
    elsif v_wrong is null and emit.version !~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$' then
        v_field := 'version'; v_wrong := 'this is not a version';
    elsif v_wrong is null and v_id !~ '^[A-Za-z0-9_:-]{1,128}$' then
        v_field := 'id'; v_wrong := 'an event id is 1 to 128 of the characters A-Z a-z 0-9 _ : -';
    elsif v_wrong is null and (emit.ordering_key = '' or octet_length(emit.ordering_key) > 255) then
        v_field := 'ordering_key'; v_wrong := 'an ordering key is 1 to 255 bytes';
    end if;
    if v_wrong is not null then
        raise exception using errcode = 'PR422', message = v_wrong, column = v_field;
    end if;
    if emit.ordering_key is not null then
        -- Held until the commit, so that the events of a key are numbered in the order they commit in.
        perform pg_advisory_xact_lock(hashtextextended(emit.tenant || ' ' || emit.ordering_key, 7461));
    end if;
    loop
        insert into postrider.outbox (tenant, type, data, id, version, ordering_key)
        values (emit.tenant, emit.type, emit.data, v_id, emit.version, emit.ordering_key)
        on conflict do nothing;
        exit when found;
        select * into v_found from postrider.outbox o where o.tenant = emit.tenant and o.id = v_id;
        -- Not there any more: it was relayed just now, and the main database is the one to compare.
        continue when not found;
        if (v_found.type, v_found.data, v_found.version, v_found.ordering_key)
           is distinct from (emit.type, emit.data, emit.version, emit.ordering_key) then
            raise exception using errcode = 'PR409', column = 'id',
                message = format('event id %L was used before with other content', v_id);
        end if;
        exit;
    end loop;
    return v_id;
end $$;

revoke all on all functions in schema postrider from public;
