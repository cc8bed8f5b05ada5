-- Whether anything may be sent.

-- The cluster and the database, as the server names them. A standby that is promoted keeps both; a database that was restored
-- from a dump, or copied from a template, has others. Null where this role may not execute pg_control_system().
create or replace function postrider.database_identity() returns text language plpgsql stable as $$
begin
    return (select s.system_identifier::text || '/' || d.oid::text
            from pg_catalog.pg_control_system() s, pg_catalog.pg_database d
            where d.datname = pg_catalog.current_database());
exception when insufficient_privilege then
    return null;
end $$;

-- What distinguishes most copies where the server does not reveal its identity: a restore creates every table anew. Two copies
-- that were restored in the same way may have the same one.
create or replace function postrider.database_oids() returns text language sql stable as $$
    select format('oids/%s/%s/%s/%s', d.oid, 'postrider.tenants'::regclass::oid, 'postrider.endpoints'::regclass::oid,
                  'postrider.sending'::regclass::oid)
    from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()
$$;

-- Nothing is sent while `stopped`. `restored`: because this is a restored copy that nobody has confirmed. With
-- `identity_hidden` it is unknown whether it is one.
drop function if exists postrider.sending_state();
create or replace function postrider.sending_state()
returns table (stopped boolean, restored boolean, stopped_at timestamptz, stopped_by text, reason text,
               identity_hidden boolean)
language sql stable as $$
    select s.stopped_at is not null or c.restored, c.restored, s.stopped_at, s.stopped_by, s.reason,
           c.restored and i.identity is null
    from postrider.sending s
    cross join lateral (
        select case when s.identity like 'oids/%' then postrider.database_oids()
                    when s.identity is not null then postrider.database_identity() end as identity
    ) i
    cross join lateral (
        select s.identity is not null and s.identity is distinct from i.identity as restored
    ) c
$$;

create or replace trigger sending_stamp before update on postrider.sending
    for each row execute function postrider.stamp_xid();
create or replace trigger sending_wake after update on postrider.sending
    for each statement execute function postrider.wake();
