-- Whether anything may be sent.

-- The cluster and the database, as the server names them. A standby that is promoted keeps both; a database that was restored
-- from a dump, or copied from a template, has others. Null where the server does not reveal it.
create or replace function postrider.database_identity() returns text language plpgsql stable as $$
begin
    return (select s.system_identifier::text || '/' || d.oid::text
            from pg_catalog.pg_control_system() s, pg_catalog.pg_database d
            where d.datname = pg_catalog.current_database());
exception when insufficient_privilege then
    return null;
end $$;

-- Nothing is sent while `stopped`. `restored`: because this is a restored copy that nobody has confirmed.
create or replace function postrider.sending_state()
returns table (stopped boolean, restored boolean, stopped_at timestamptz, stopped_by text, reason text)
language sql stable as $$
    select s.stopped_at is not null or c.restored, c.restored, s.stopped_at, s.stopped_by, s.reason
    from postrider.sending s
    cross join lateral (
        select s.identity is not null and s.identity is distinct from postrider.database_identity() as restored
    ) c
$$;

create or replace trigger sending_stamp before update on postrider.sending
    for each row execute function postrider.stamp_xid();
create or replace trigger sending_wake after update on postrider.sending
    for each statement execute function postrider.wake();
