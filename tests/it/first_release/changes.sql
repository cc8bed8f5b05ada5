-- How dispatchers notice changes.

-- Marks a changed setting with the transaction that changed it.
create or replace function postrider.stamp_xid() returns trigger language plpgsql as $$
begin
    new.xid := pg_current_xact_id();
    return new;
end $$;

create or replace trigger endpoints_stamp before update on postrider.endpoints
    for each row execute function postrider.stamp_xid();
create or replace trigger secrets_stamp before update on postrider.secrets
    for each row execute function postrider.stamp_xid();

-- The advisory lock that a dispatcher holds while dispatchers rely on notifications.
create or replace function postrider.wake_lock() returns bigint language sql immutable as 'select 5787040128514159461';

-- Wakes the dispatchers after a change that they must see. A notification makes commits wait for each other, so it is sent
-- only while a dispatcher holds the wake lock. Otherwise this transaction shares the lock until it has committed, and
-- dispatchers poll at least until then.
create or replace function postrider.wake() returns trigger language plpgsql as $$
begin
    if not pg_catalog.pg_try_advisory_xact_lock_shared(5787040128514159461) then
        perform pg_catalog.pg_notify('postrider', '');
    end if;
    return null;
end $$;

create or replace trigger queue_wake after insert on postrider.queue
    for each statement execute function postrider.wake();
create or replace trigger endpoints_wake after insert or update on postrider.endpoints
    for each statement execute function postrider.wake();
create or replace trigger secrets_wake after insert or update on postrider.secrets
    for each statement execute function postrider.wake();

-- Takes the wake lock if it is free, and returns the session that holds it. One that has not checked for five seconds belongs
-- to a process that is stopped, and is ended: its notifications would pile up.
create or replace function postrider.hold_wake_lock(already boolean) returns int language plpgsql as $$
declare
    v_pid   int;
    v_stale boolean;
begin
    if already or pg_try_advisory_lock(postrider.wake_lock()) then
        return pg_backend_pid();
    end if;
    -- The lock may also be shared by transactions that have not committed.
    select l.pid, a.state_change < clock_timestamp() - interval '5 seconds' into v_pid, v_stale
    from pg_locks l left join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'advisory' and l.mode = 'ExclusiveLock' and l.granted and l.objsubid = 1
      and l.database = (select oid from pg_database where datname = current_database())
      and (l.classid::bigint << 32) + l.objid::bigint = postrider.wake_lock();
    if v_stale then
        perform pg_terminate_backend(v_pid);
        return null;
    end if;
    return v_pid;
end $$;

-- Whether producers wait for each other in order to notify. The lock is on database 0, for all databases of the server.
create or replace function postrider.notifications_are_contended() returns boolean language sql as $$
    select exists (select from pg_locks l
                   where l.locktype = 'object' and l.classid = 'pg_database'::regclass and l.objid = 0 and not l.granted)
$$;
