with counted as materialized (
    select endpoint_id, date_trunc('minute', started_at) as minute, width_bucket(duration_ms, $2::int[]) as bucket,
           count(*) as n, count(*) filter (where final = 'delivered') as delivered,
           count(*) filter (where final = 'dead') as dead, count(*) filter (where final is null) as retried,
           count(*) filter (where status = 500) as failed
    from postrider.attempts a
    where a.endpoint_id in (select e.id from postrider.endpoints e join postrider.tenants t on t.id = e.tenant_id
                            where t.slug like 'seed-%')
    group by 1, 2, 3
), both_ways as materialized (
    select * from counted union all
    select 0, minute, bucket, sum(n), sum(delivered), sum(dead), sum(retried), sum(failed)
    from counted group by minute, bucket
), total as (
    select endpoint_id, minute, sum(n) as n, sum(delivered) as delivered, sum(dead) as dead,
           sum(retried) as retried, sum(failed) as failed
    from both_ways group by 1, 2
), spread as (
    select t.endpoint_id, t.minute, array_agg(coalesce(b.n, 0)::int order by place) as durations
    from total t cross join generate_series(0, cardinality($2::int[])) as place
    left join both_ways b on b.endpoint_id = t.endpoint_id and b.minute = t.minute and b.bucket = place
    group by 1, 2
)
insert into postrider.minute_statistics
    (endpoint_id, minute, writer, delivered, retried, dead, any_failed, classes, durations)
select endpoint_id, minute, $1, delivered, retried, dead, failed > 0,
       array[n - failed, 0, 0, failed, 0, 0, 0, 0, 0, 0, 0]::int[], durations
from total join spread using (endpoint_id, minute)
