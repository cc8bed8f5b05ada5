-- Traces: where an event belongs in the trace of whoever emitted it. A row only of events that came with a trace while traces
-- were on, so that an emit without one costs nothing. Beside `events` and not in it: what stands here is of use for days.
create table postrider.traces (
    event_id uuid primary key,
    context  bytea not null check (octet_length(context) = 25)    -- trace, span, flags
);

-- `emit` with a `traceparent` of the W3C's form. One that is not of it is passed over: an event must not be lost for it.
create function postrider.emit_traced(
    traceparent text, tenant text, type text, data text,
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
        values (done.event_id, decode(replace(substring(traceparent from 4), '-', ''), 'hex'));
    end if;
    return done.id;
end $$;

revoke all on function postrider.emit_traced from public;

-- As in 0002: where the schema is made by a superuser, it goes to the role that has just the rights it needs.
do $$
begin
    if (select rolsuper from pg_roles where rolname = current_user) then
        grant create on schema postrider to postrider_emit;
        grant insert on postrider.traces to postrider_emit;
        alter function postrider.emit_traced owner to postrider_emit;
        revoke create on schema postrider from postrider_emit;
    end if;
end $$;
