-- Quotas of tenants. Only tenants that have one pay for it: `emit` calls these functions for no other.
--
-- What is counted becomes visible with the producer's commit, so that transactions that are open at the same time may exceed a
-- quota together. They never wait for each other.

-- What a tenant may still emit in this minute, and store. Null: unlimited.
create or replace function postrider.quota_left(tenant_id int, out emits bigint, out bytes bigint) language sql stable as $$
    select t.emits_per_minute - coalesce(u.emits, 0), (t.stored_bytes_max - coalesce(u.bytes, 0))::bigint
    from postrider.tenants t
    cross join lateral (
        select sum(u.emits) filter (where u.minute = date_trunc('minute', clock_timestamp())) as emits, sum(u.bytes) as bytes
        from postrider.tenant_usage u where u.tenant_id = t.id
    ) u
    where t.id = quota_left.tenant_id
$$;

-- What the body of an event takes, given its data.
create or replace function postrider.counted_bytes(data text) returns bigint language sql immutable as $$
    select octet_length(data) + 128::bigint
$$;

-- The fault of one more event, as in `find_fault`; null if the quota admits it. An id that exists is not a new event.
create or replace function postrider.quota_fault(tenant_id int, data text, id text) returns int language plpgsql as $$
declare
    v_left  record;
    v_fault int;
begin
    select q.emits, q.bytes into v_left from postrider.quota_left(quota_fault.tenant_id) q;
    v_fault := case when v_left.emits < 1 then 9 when v_left.bytes < postrider.counted_bytes(data) then 10 end;
    if v_fault is not null and quota_fault.id is not null
       and exists (select from postrider.event_ids i where i.tenant_id = quota_fault.tenant_id and i.id = quota_fault.id) then
        return null;
    end if;
    return v_fault;
end $$;

-- The same for several events, in their order: the first ones of a tenant are admitted.
create or replace function postrider.quota_faults(tenants text[], data text[], ids text[]) returns int[]
language sql stable as $$
    with quota as materialized (
        select t.id, t.slug, q.emits, q.bytes from postrider.tenants t cross join lateral postrider.quota_left(t.id) q
        where t.slug = any(quota_faults.tenants) and t.deleted_at is null and t.usage_since is not null
    ),
    fresh as (
        select g.n, q.emits, q.bytes, row_number() over given_order as place,
               sum(postrider.counted_bytes(g.data)) over given_order as total
        from unnest(quota_faults.tenants, quota_faults.data, quota_faults.ids) with ordinality as g (tenant, data, id, n)
        join quota q on q.slug = g.tenant
        where not exists (select from postrider.event_ids i where i.tenant_id = q.id and i.id = g.id)
        window given_order as (partition by q.id order by g.n)
    )
    select array_agg(case when f.place > f.emits then 9 when f.total > f.bytes then 10 end order by g.n)
    from unnest(quota_faults.tenants) with ordinality as g (tenant, n) left join fresh f on f.n = g.n
$$;

create or replace function postrider.count_usage(tenant_id int, emits bigint, bytes bigint) returns void language plpgsql as $$
declare
    v_minute timestamptz := date_trunc('minute', clock_timestamp());
    v_day    date := (clock_timestamp() at time zone 'UTC')::date;
begin
    -- In the other isolation levels an update would fail if another transaction came first.
    if current_setting('transaction_isolation') = 'read committed' then
        update postrider.tenant_usage u
        set bytes = u.bytes + count_usage.bytes,
            emits = case when u.minute = v_minute then u.emits else 0 end + count_usage.emits,
            minute = v_minute
        where u.tenant_id = count_usage.tenant_id and u.day = v_day
          and u.slot = (select f.slot from postrider.tenant_usage f
                        where f.tenant_id = count_usage.tenant_id and f.day = v_day limit 1 for update skip locked);
        if found then
            return;
        end if;
    end if;
    insert into postrider.tenant_usage (tenant_id, day, bytes, minute, emits)
    values (count_usage.tenant_id, v_day, count_usage.bytes, v_minute, count_usage.emits);
end $$;
