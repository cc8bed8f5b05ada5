select d.event_id, d.endpoint_id, e.tenant_id, t.slug as tenant, y.name as type_name, e.chosen_id,
   p.public_id as endpoint, p.url, p.state as endpoint_state,
   t.paused_at is not null as tenant_paused, w.sending_stopped,
   coalesce(a.number, l.attempt, r.attempt, q.attempt, 0::smallint) as attempt_count, a.status, a.outcome,
   a.error, a.started_at as last_attempt_at, r.due_at, l.reason, l.died_at,
   case when l.endpoint_id is not null then 'dead' else a.final end as final
from unnest($1::uuid[], $2::int[]) as d (event_id, endpoint_id)
join postrider.endpoints p on p.id = d.endpoint_id
cross join (
   select coalesce((select stopped from postrider.sending_state()), true) as sending_stopped
) w
cross join lateral (
   select v.tenant_id, v.type_id, v.chosen_id from postrider.events v
   where v.tenant_id = p.tenant_id and v.id = d.event_id
   union all
   select v.tenant_id, v.type_id, v.chosen_id from postrider.archived_events v
   where v.tenant_id = p.tenant_id and v.id = d.event_id
   limit 1
) e
join postrider.tenants t on t.id = e.tenant_id
join postrider.event_types y on y.id = e.type_id
left join lateral (
   select a.number, a.status, a.outcome, a.error, a.started_at, a.final from (
       (select a.number, a.status, a.outcome, a.error, a.started_at, a.final from postrider.attempts a
        where a.event_id = d.event_id and a.endpoint_id = d.endpoint_id order by a.number desc limit 1)
       union all
       (select a.number, a.status, a.outcome, a.error, a.started_at, a.final from postrider.archived_attempts a
        where a.event_id = d.event_id and a.endpoint_id = d.endpoint_id order by a.number desc limit 1)
   ) a order by a.number desc limit 1
) a on true
left join postrider.retries r on r.endpoint_id = d.endpoint_id and r.event_id = d.event_id
left join postrider.queue q on q.endpoint_id = d.endpoint_id and q.event_id = d.event_id
left join postrider.dead_letters l on l.endpoint_id = d.endpoint_id and l.event_id = d.event_id
where a.final is not null or r.endpoint_id is not null or q.endpoint_id is not null or l.endpoint_id is not null
order by d.event_id desc, d.endpoint_id desc
