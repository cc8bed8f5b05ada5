with size as (
    select pg_relation_size('postrider.queue') + pg_relation_size('postrider.retries') <= $1 as is_small
),
pending as (
    select endpoint_id, count(*) as found from (
        select endpoint_id from postrider.queue limit (select case when is_small then $2 else 0 end from size)) q
    group by endpoint_id
    union all
    select endpoint_id, count(*) from (
        select endpoint_id from postrider.retries limit (select case when is_small then $2 else 0 end from size)) r
    group by endpoint_id
)
select coalesce(sum(found) filter (where p.id is not null), 0)::bigint as counted,
       is_small and coalesce(sum(found), 0) < $2 as is_exact,
       greatest(pg_stat_get_live_tuples('postrider.queue'::regclass), 0)
       + greatest(pg_stat_get_live_tuples('postrider.retries'::regclass), 0) as estimated
from size
left join pending on true
left join postrider.endpoints p on p.id = pending.endpoint_id and p.state <> 'deleted'
group by is_small
