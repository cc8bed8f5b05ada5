select e.id, e.tenant_id, e.shard, e.state, e.state_reason, e.url, e.concurrency, e.rate_per_second, e.ordered,
       e.retry_schedule, e.timeout_ms, e.signature, e.headers, e.tls, e.filter,
       exists (select from postrider.endpoint_health h
               where h.endpoint_id = e.id
                 and h.failing_since < clock_timestamp() - interval '1 minute') as was_failing,
       coalesce(s.secrets, '{}') as secrets, coalesce(s.retire, '{}') as retire,
       array(select distinct q.replay_id from postrider.queue q
             join postrider.replays r on r.public_id = q.replay_id
             where q.endpoint_id = e.id and q.replay_id is not null and q.was_source is not null
               and r.state = 'cancelled' and e.state <> 'deleted') as cancelled
from postrider.endpoints e
left join lateral (
    select array_agg(s.ciphertext order by s.id desc) as secrets,
           array_agg(s.retires_at order by s.id desc) as retire
    from postrider.secrets s
    where s.endpoint_id = e.id and (s.retires_at is null or s.retires_at > clock_timestamp())
) s on true
where e.id = any($1)
