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
-- that emit for the tenant are waited for.
create or replace function postrider.arrive_at_home(move bigint) returns boolean language plpgsql as $$
declare
    c_most    constant int := 200;
    v_tenant  int;
    v_slug    text;
    v_n       bigint[];
    v_types   text[];
    v_data    text[];
    v_ids     text[];
    v_versions text[];
    v_keys    text[];
    v_contexts bytea[];
    v_done    postrider.emission;
begin
    select m.tenant_id, t.slug into v_tenant, v_slug
    from postrider.tenant_moves m join postrider.tenants t on t.id = m.tenant_id
    where m.id = move and m.state = 'switching' for update of m;
    if not found then
        return true;
    end if;
    perform pg_advisory_xact_lock(postrider.whereabouts_lock(), v_tenant);
    -- Only this transaction sees it, unless it is the last.
    update postrider.tenants set moving = false where id = v_tenant;
    select array_agg(o.n order by o.n), array_agg(o.type order by o.n), array_agg(o.data order by o.n), array_agg(o.id order by o.n),
           array_agg(o.version order by o.n), array_agg(o.ordering_key order by o.n), array_agg(o.context order by o.n)
    into v_n, v_types, v_data, v_ids, v_versions, v_keys, v_contexts
    from (select o.* from postrider.cell_outbox o
          where o.tenant_id = v_tenant and o.cell_id is null order by o.n limit c_most) o;
    if v_n is not null then
        for v_done in
            select e.* from postrider.emit_all(array_fill(v_slug, array[cardinality(v_n)]), v_types, v_data, v_ids, v_versions, v_keys,
                                               null, v_contexts) e
        loop
            if v_done.refusal in ('PR429', 'PR507') then
                raise exception using errcode = v_done.refusal, message = v_done.message;
            elsif v_done.refusal is not null then
                insert into postrider.cell_outbox_refused
                    (n, tenant_id, cell_id, type, data, id, version, ordering_key, created_at, refusal, message)
                select o.n, o.tenant_id, 0, o.type, o.data, o.id, o.version, o.ordering_key, o.created_at, v_done.refusal,
                       v_done.message
                from postrider.cell_outbox o where o.n = v_n[v_done.position + 1];
            end if;
        end loop;
        delete from postrider.cell_outbox where n = any(v_n);
    end if;
    if cardinality(v_n) = c_most then
        update postrider.tenants set moving = true where id = v_tenant;
        return false;
    end if;
    update postrider.tenant_moves set state = 'erasing', switched_at = clock_timestamp() where id = move;
    return true;
end $$;
