-- Moves of tenants between cells.

-- Dispatchers stop sending to a tenant that leaves, and begin with one that has arrived. Also fires where a subscription applies what
-- was changed at home.
create or replace trigger tenants_move after update on postrider.tenants
    for each row when (old.is_here is distinct from new.is_here) execute function postrider.apply_pause();
alter table postrider.tenants enable always trigger tenants_move;

create or replace trigger tenant_moves_wake after insert or update of state on postrider.tenant_moves
    for each statement execute function postrider.wake('moves');

-- Emits the next events that waited at home for a tenant that comes home, in their order. The tenant has arrived with the last of them:
-- until then it is moving, so that no event overtakes them. Returns whether it has. The caller sets a lock timeout: transactions
-- that emit for the tenant are waited for, and others that begin to do so wait meanwhile.
-- These events were accepted already: no quota refuses them, and Postrider's own are among them.
create or replace function postrider.arrive_at_home(move bigint) returns boolean language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
    v_until  timestamptz := clock_timestamp() + interval '1 second';
    v_tenant int;
    v_slug   text;
    v_row    postrider.cell_outbox;
    v_done   postrider.emission;
begin
    select m.tenant_id, t.slug into v_tenant, v_slug
    from postrider.tenant_moves m join postrider.tenants t on t.id = m.tenant_id
    where m.id = move and t.moving and (m.state = 'switching' or m.state = 'cancelling' and m.source = 0) for update of m;
    if not found then
        return true;
    end if;
    perform pg_advisory_xact_lock(postrider.whereabouts_lock(), v_tenant);
    -- Only this transaction sees it, unless it is the last.
    update postrider.tenants set moving = false where id = v_tenant;
    for v_row in
        select o.* from postrider.cell_outbox o where o.tenant_id = v_tenant and o.cell_id is null order by o.n
    loop
        if clock_timestamp() > v_until then
            update postrider.tenants set moving = true where id = v_tenant;
            return false;
        end if;
        v_done := postrider.emit_one(v_slug, v_row.type, v_row.data, v_row.id, v_row.version, v_row.ordering_key,
                                     context => v_row.context, reserved => true);
        if v_done.refusal is not null then
            insert into postrider.cell_outbox_refused
                (n, tenant_id, cell_id, type, data, id, version, ordering_key, created_at, refusal, message)
            values (v_row.n, v_tenant, 0, v_row.type, v_row.data, v_row.id, v_row.version, v_row.ordering_key, v_row.created_at,
                    v_done.refusal, v_done.message);
        end if;
        delete from postrider.cell_outbox o where o.n = v_row.n;
    end loop;
    update postrider.tenant_moves set state = 'erasing', switched_at = clock_timestamp() where id = move and state = 'switching';
    return true;
end $$;
