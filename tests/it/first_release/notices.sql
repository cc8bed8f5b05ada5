-- Operational events: what Postrider reports about itself.

-- Emits an operational event to the tenant it is about, and to the tenants that receive those of every tenant. Returns
-- the SQLSTATE if the tenant itself did not get it.
create or replace function postrider.announce(about int, type text, data jsonb) returns text language plpgsql as $$
declare
    v_row     record;
    v_done    postrider.emission;
    v_data    text;
    v_refusal text := 'PR404';
begin
    select (jsonb_build_object('tenant', t.slug) || data)::text into v_data from postrider.tenants t where t.id = about;
    for v_row in
        select t.id, t.slug from postrider.tenants t
        where t.deleted_at is null and (t.id = about or t.all_operational_events) order by t.id
    loop
        v_done := postrider.emit_one(v_row.slug, type, v_data, reserved => true);
        if v_row.id = about then
            v_refusal := v_done.refusal;
        end if;
    end loop;
    return v_refusal;
end $$;

-- Leaves a notice for each new dead letter that an endpoint has subscribed to.
create or replace function postrider.notice_dead() returns trigger language plpgsql as $$
begin
    if (exists (select from postrider.endpoints e
                where e.tenant_id = new.tenant_id and e.state in ('active', 'paused')
                  and e.types && '{postrider.*,postrider.delivery.*,postrider.delivery.dead}')
        or exists (select from postrider.tenants t join postrider.endpoints e on e.tenant_id = t.id
                   where t.all_operational_events and t.deleted_at is null and e.state in ('active', 'paused')
                     and e.types && '{postrider.*,postrider.delivery.*,postrider.delivery.dead}'))
       -- Not for operational events: each would cause the next one.
       and not exists (select from postrider.event_types y where y.id = new.type_id and y.name like 'postrider.%')
    then
        insert into postrider.notices (endpoint_id, event_id, reason, attempt)
        values (new.endpoint_id, new.event_id, new.reason, new.attempt);
    end if;
    return null;
end $$;

-- A cancelled replay restores dead letters with their old time of death: those were reported before.
create or replace trigger dead_letters_notice after insert on postrider.dead_letters
    for each row when (new.died_at >= statement_timestamp()) execute function postrider.notice_dead();

-- Leaves a notice when an endpoint that was disabled, or had been failing for minutes, accepts a delivery.
create or replace function postrider.notice_recovered() returns trigger language plpgsql as $$
begin
    if (old.disabled or old.failing_since < clock_timestamp() - interval '5 minutes')
       -- Endpoints that receive only operational events are not reported.
       and exists (select from postrider.endpoints e, unnest(e.types) p
                   where e.id = old.endpoint_id and e.state = 'active' and p not like 'postrider.%')
    then
        insert into postrider.notices (endpoint_id, since) values (old.endpoint_id, old.failing_since);
    end if;
    return null;
end $$;

-- The first success deletes the endpoint's row.
create or replace trigger endpoint_health_notice after delete on postrider.endpoint_health
    for each row execute function postrider.notice_recovered();
