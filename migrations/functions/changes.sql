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

-- Waits until any transaction has begun or ended since the snapshot `seen`, and returns whether one has. An idle dispatcher
-- polls inside the server this way, without a round trip for each look.
create or replace function postrider.wait_for_change(seen text, look_every double precision, looks int) returns boolean
language plpgsql as $$
begin
    for i in 1 .. looks loop
        if pg_current_snapshot()::text <> seen then
            return true;
        end if;
        perform pg_sleep(look_every);
    end loop;
    return false;
end $$;
