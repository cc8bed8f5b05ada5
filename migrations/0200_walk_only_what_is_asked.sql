-- The planner takes a table that was empty at the last vacuum for an empty one, where every index costs the same, and then
-- looked for a delivery by walking the whole index of the tail, or all that waits for a time. What an index is not for it can't
-- be used for when its condition, which is true of every row, does not follow from the statement.
create index queue_xid on postrider.queue (xid, endpoint_id, event_id) where shard >= 0;
drop index postrider.queue_tail;
create index retries_next on postrider.retries (endpoint_id, due_at) where attempt >= 0;
drop index postrider.retries_due;

-- Many events, each with its own answer, at the position it was given at.
create or replace function postrider.emit_all(
    tenants text[], types text[], data text[], ids text[], versions text[], ordering_keys text[], checked_schemas int[]
) returns table (
    "position" int, event_id uuid, id text, created_at timestamptz, duplicate boolean,
    refusal text, field text, message text, version text, sequence bigint
) language plpgsql security definer set search_path = pg_catalog, postrider, pg_temp as $$
declare
    v_row    record;
    v_done   postrider.emission;
    v_plain  int;
    v_before bigint;
    v_many   boolean := cardinality(types) > 200;
begin
    if cardinality(types) > 1000 then
        raise exception using errcode = 'PR422', message = 'at most 1000 events are taken in one call', column = 'events';
    end if;
    -- 200 events to the 500 endpoints that a tenant may have are the most that is allowed: fewer need no counting. Nor do
    -- more where the endpoints are few: a transaction of many batches would count all it made before with each of them.
    if v_many then
        select cardinality(types) * coalesce(max(e.count), 0) > 100000 into v_many
        from (select count(*) from postrider.tenants t join postrider.endpoints e on e.tenant_id = t.id
              where t.slug = any(tenants) and e.state in ('active', 'paused')
              group by t.id) e;
    end if;
    if v_many then
        select count(*) into v_before from postrider.queue q where q.xid = pg_current_xact_id() and q.shard >= 0;
    end if;

    return query select * from postrider.emit_plain(tenants, types, data, ids, versions, ordering_keys, checked_schemas);
    get diagnostics v_plain = row_count;

    -- Keys and ids are taken in one order whoever emits, so that two batches wait for each other and do not deadlock; the
    -- events of one key keep the order they came in.
    if v_plain < cardinality(types) then
        for v_row in
            select u.* from unnest(tenants, types, data, ids, versions, ordering_keys, checked_schemas)
                with ordinality as u (tenant, type, data, id, version, ordering_key, checked_schema, n)
            where v_plain = 0 or u.id is not null or u.ordering_key is not null
            order by u.tenant, u.ordering_key nulls last, case when u.ordering_key is null then u.id end nulls last, u.n
        loop
            v_done := postrider.emit_against(v_row.tenant, v_row.type, v_row.data, v_row.id, v_row.version,
                                             v_row.ordering_key, false, v_row.checked_schema);
            "position" := v_row.n - 1;
            event_id := v_done.event_id; id := v_done.id; created_at := v_done.created_at;
            duplicate := v_done.duplicate; refusal := v_done.refusal; field := v_done.field;
            message := v_done.message; version := v_done.version; sequence := v_done.sequence;
            return next;
        end loop;
    end if;

    if v_many and (select count(*) from postrider.queue q
                   where q.xid = pg_current_xact_id() and q.shard >= 0) - v_before > 100000 then
        raise exception using errcode = 'PR422', column = 'events',
            message = 'these events would make more than 100000 deliveries: send them in smaller batches';
    end if;
end $$;
