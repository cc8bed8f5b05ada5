-- `tracestate`, which goes with `traceparent`, stands behind the 25 bytes of a context. Not checked on rows that are there:
-- they are shorter.
alter table postrider.traces drop constraint traces_context_check;
alter table postrider.traces
    add constraint traces_context_check check (octet_length(context) between 25 and 25 + 512) not valid;

-- `emit_traced` with a `tracestate` of the W3C's form. Whether it is of it is looked at when it is passed on; what can't be
-- is left out here, and the event is emitted all the same.
create function postrider.emit_in_trace(
    traceparent text, tracestate text, tenant text, type text, data text,
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
    if not done.duplicate and traceparent ~ '^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$' then
        insert into postrider.traces (event_id, context)
        values (
            done.event_id,
            decode(replace(substring(traceparent from 4), '-', ''), 'hex')
            || case when tracestate ~ '^[ -~]+$' and length(tracestate) <= 512 then convert_to(tracestate, 'UTF8') else '' end
        );
    end if;
    return done.id;
end $$;

revoke all on function postrider.emit_in_trace from public;

-- As in 0002: where the schema is made by a superuser, it goes to the role that has just the rights it needs.
do $$
begin
    if (select rolsuper from pg_roles where rolname = current_user) then
        grant create on schema postrider to postrider_emit;
        alter function postrider.emit_in_trace owner to postrider_emit;
        revoke create on schema postrider from postrider_emit;
    end if;
end $$;
