-- Events with their deliveries by state. Pending ones are looked up by endpoint, as their tables are indexed.
-- $1 events, $2 their tenants, $3 ended deliveries that are counted of one event, $4 whether pending ones are looked up only for
-- events without an ended one.
select u.id, t.slug as tenant, y.name as type_name, e.chosen_id, d.delivered, d.dead, d.discarded, p.pending
from unnest($1::uuid[], $2::int[]) as u (id, tenant_id)
cross join lateral (
   select v.type_id, v.chosen_id from postrider.events v where v.tenant_id = u.tenant_id and v.id = u.id
   union all
   select v.type_id, v.chosen_id from postrider.archived_events v where v.tenant_id = u.tenant_id and v.id = u.id
   limit 1
) e
join postrider.tenants t on t.id = u.tenant_id
join postrider.event_types y on y.id = e.type_id
cross join lateral (
   select count(*) filter (where a.final = 'delivered') as delivered,
      count(*) filter (where a.final = 'discarded') as discarded,
      (select count(*) from postrider.dead_letters l where l.tenant_id = u.tenant_id and l.event_id = u.id) as dead
   from (
      select a.final from postrider.attempts a where a.event_id = u.id and a.final is not null limit $3
   ) a
) d
cross join lateral (
   select count(*) as pending from postrider.endpoints p
   where not ($4 and d.delivered + d.dead + d.discarded > 0)
     and p.tenant_id = u.tenant_id and p.state <> 'deleted'
     and (exists (select from postrider.queue q where q.endpoint_id = p.id and q.event_id = u.id)
          or exists (select from postrider.retries r where r.endpoint_id = p.id and r.event_id = u.id))
) p
order by u.id desc
