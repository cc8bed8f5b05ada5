-- The health of these endpoints, without listeners and deleted ones. Those of a paused tenant are paused, too.
-- $1 endpoints; filters, null for any: $2 state, $3 failing, $4 circuit open; $5 the most rows; $6 days of failures after
-- which an endpoint is disabled, $7 the most days between two of them.
select e.id, e.public_id, t.slug as tenant, e.url, e.description, e.state, s.state as effective_state, h.failing_since,
       case when s.state = 'active' and h.last_failed_on >= (clock_timestamp() at time zone 'UTC')::date - $7::int
            then h.failing_since + $6::int * interval '1 day' end as disabled_after,
       coalesce(a.in_flight, 0) as in_flight, a.oldest_at, coalesce(a.circuit_open, false) as circuit_open
from unnest($1::int[]) as n (id)
join postrider.endpoints e on e.id = n.id and e.state <> 'deleted'
join postrider.tenants t on t.id = e.tenant_id
cross join lateral (
    select case when t.paused_at is not null and e.state = 'active' then 'paused' else e.state end as state) s
left join postrider.endpoint_health h on h.endpoint_id = e.id
left join lateral (
    select a.in_flight, a.oldest_at, a.circuit_open
    from postrider.endpoint_activity a
    join postrider.dispatchers d on d.id = a.writer and d.expires_at > clock_timestamp()
    where a.endpoint_id = e.id) a on true
where ($2::text is null or s.state = $2::postrider.endpoint_state)
  and ($3::bool is null or (h.endpoint_id is not null) = $3)
  and ($4::bool is null or coalesce(a.circuit_open, false) = $4)
  and not exists (select from postrider.listeners l where l.endpoint_id = e.id)
order by e.id limit $5
