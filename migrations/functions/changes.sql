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

-- Takes the wake lock if it is free, and returns whether a session holds it and whether it is this one.
create or replace function postrider.hold_wake_lock(already boolean) returns table (held boolean, ours boolean)
language plpgsql as $$
begin
    ours := already or pg_try_advisory_lock(postrider.wake_lock());
    -- The lock may also be shared by transactions that have not committed.
    held := ours or exists (
        select from pg_locks l
        where l.locktype = 'advisory' and l.mode = 'ExclusiveLock' and l.granted and l.objsubid = 1
          and l.database = (select oid from pg_database where datname = current_database())
          and (l.classid::bigint << 32) + l.objid::bigint = postrider.wake_lock());
    return next;
end $$;
