-- `security definer` functions never run as a superuser. Those that a superuser created or restored are given to
-- `pg_database_owner`, with just the rights they need. That role exists in every cluster, so that a dump which names it can be
-- restored anywhere.
do $$
declare
    f regprocedure;
begin
    if not (select rolsuper from pg_roles where rolname = current_user) then
        return;
    end if;
    grant usage on schema postrider to pg_database_owner;
    grant select on postrider.tenants, postrider.event_types, postrider.schemas, postrider.endpoints to pg_database_owner;
    -- One column is enough for a lock on the row.
    grant update (name) on postrider.tenants to pg_database_owner;
    grant update (emitted) on postrider.schemas to pg_database_owner;
    grant select, insert on postrider.events, postrider.event_ids, postrider.queue to pg_database_owner;
    grant select, insert, update on postrider.ordering_keys to pg_database_owner;
    grant insert on postrider.traces to pg_database_owner;
    grant select, insert, update on postrider.tenant_usage to pg_database_owner;
    grant select on postrider.this_cell, postrider.cell_quotas_used to pg_database_owner;
    grant select (id, name) on postrider.cells to pg_database_owner;
    grant select, insert on postrider.cell_outbox to pg_database_owner;
    grant usage on sequence postrider.cell_outbox_n to pg_database_owner;
    grant select, insert, update (key) on postrider.cell_outbox_keys to pg_database_owner;
    grant execute on all functions in schema postrider to pg_database_owner;
    for f in select p.oid::regprocedure from pg_proc p join pg_roles r on r.oid = p.proowner
             where p.pronamespace = 'postrider'::regnamespace and p.prosecdef and r.rolsuper loop
        execute format('alter function %s owner to pg_database_owner', f);
    end loop;
end $$;
