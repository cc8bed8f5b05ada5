-- Cells: which tenants this database serves.

-- Also fires where a subscription applies what was changed at home.
create or replace function postrider.find_home() returns trigger language plpgsql as $$
declare
    v_lives_here boolean := new.cell_id = (select c.id from postrider.this_cell c);
begin
    new.is_here := v_lives_here and not new.moving;
    -- Events are counted where they are stored.
    if not v_lives_here or new.emits_per_minute is null and new.stored_bytes_max is null then
        new.usage_since := null;
        new.usage_measured := false;
    else
        new.usage_since := coalesce(new.usage_since, clock_timestamp());
    end if;
    return new;
end $$;

create or replace trigger tenants_home before insert or update on postrider.tenants
    for each row execute function postrider.find_home();
alter table postrider.tenants enable always trigger tenants_home;

-- A tenant that was paused or resumed at home: dispatchers of its cell find its endpoints by the transaction that changed them. The
-- triggers of `endpoints` do not fire where a subscription applies a change.
create or replace function postrider.apply_pause() returns trigger language plpgsql as $$
begin
    update postrider.endpoints e set xid = pg_current_xact_id() where e.tenant_id = new.id and e.state <> 'deleted';
    if found and not pg_catalog.pg_try_advisory_xact_lock_shared(postrider.wake_lock()) then
        perform pg_catalog.pg_notify('postrider', '');
    end if;
    return null;
end $$;

create or replace trigger tenants_pause after update on postrider.tenants
    for each row when (old.paused_at is distinct from new.paused_at) execute function postrider.apply_pause();
alter table postrider.tenants enable replica trigger tenants_pause;
