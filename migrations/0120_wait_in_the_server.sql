-- An idle dispatcher waits here: the server looks, and no message goes to and fro for each look. Answers whether the
-- snapshot is another than the one given: whether any transaction has begun or ended since.
create function postrider.wait_for_change(seen text, look_every double precision, looks int) returns boolean
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
revoke all on function postrider.wait_for_change from public;
