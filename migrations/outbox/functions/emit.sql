-- `emit` in a producer's own database: the same call as in the main one, stored in `outbox` until it is relayed.
-- Tenants, types and versions are known only to the main database, so that only their form is checked here. Events that the
-- main database refuses end up in `outbox_refused` with the reason.
create or replace function postrider.emit(
    tenant text, type text, data text,
    id text default null, version text default null, ordering_key text default null
) returns text language plpgsql
security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    v_id    text := coalesce(emit.id, 'evt_s' || replace(gen_random_uuid()::text, '-', ''));
    v_found postrider.outbox;
    v_error text;
    v_field text := 'data';
begin
    begin
        if emit.data is null or json_typeof(emit.data::json) <> 'object' then
            v_error := 'data must be a JSON object';
        elsif octet_length(emit.data) > 262144 then
            v_error := 'data is too large: the limit is 262144 bytes';
        end if;
    exception
        when statement_too_complex then v_error := 'data is nested too deeply: the limit is 128 levels';
        when others then v_error := 'data is not valid JSON';
    end;
    if v_error is null and (emit.tenant is null or emit.tenant !~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$') then
        v_field := 'tenant'; v_error := 'invalid tenant id';
    elsif v_error is null and (emit.type is null or emit.type !~ '^[a-z0-9_]+(\.[a-z0-9_]+)*$'
                               or octet_length(emit.type) > 128 or emit.type like 'postrider.%') then
        v_field := 'type'; v_error := 'invalid event type';
    elsif v_error is null and emit.version !~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$' then
        v_field := 'version'; v_error := 'invalid version';
    elsif v_error is null and v_id !~ '^[A-Za-z0-9_:-]{1,128}$' then
        v_field := 'id'; v_error := 'an event id must be 1 to 128 of the characters A-Z a-z 0-9 _ : -';
    elsif v_error is null and (emit.ordering_key = '' or octet_length(emit.ordering_key) > 255) then
        v_field := 'ordering_key'; v_error := 'an ordering key must be 1 to 255 bytes';
    end if;
    if v_error is not null then
        raise exception using errcode = 'PR422', message = v_error, column = v_field;
    end if;
    if emit.ordering_key is not null then
        -- Held until the commit, so that the events of a key are numbered in the order of their commits.
        perform pg_advisory_xact_lock(hashtextextended(emit.tenant || ' ' || emit.ordering_key, 7461));
    end if;
    loop
        insert into postrider.outbox (tenant, type, data, id, version, ordering_key)
        values (emit.tenant, emit.type, emit.data, v_id, emit.version, emit.ordering_key)
        on conflict do nothing;
        exit when found;
        select * into v_found from postrider.outbox o where o.tenant = emit.tenant and o.id = v_id;
        -- Relayed in the meantime: the main database compares the content.
        continue when not found;
        if (v_found.type, v_found.data, v_found.version, v_found.ordering_key)
           is distinct from (emit.type, emit.data, emit.version, emit.ordering_key) then
            raise exception using errcode = 'PR409', column = 'id',
                message = format('an event with id %L but different content already exists', v_id);
        end if;
        exit;
    end loop;
    return v_id;
end $$;
