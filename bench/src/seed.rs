//! `postrider-bench seed`: fills a database with a generated history, to test the pages at scale. Generated in SQL.
//! Invariant: none of it is ever sent. Pending deliveries belong to paused endpoints.

use std::time::Instant;

use anyhow::ensure;
use postrider_dispatcher::{rollup, statistics::BOUNDS_MS};
use sqlx::{AssertSqlSafe, PgPool};
use uuid::Uuid;

const TENANTS: i32 = 8;
const ENDPOINTS_PER_TENANT: i32 = 10;
/// Bounds the running time of one statement.
const EVENTS_PER_STATEMENT: i64 = 50_000;
const ATTEMPTS_MAX: i64 = 100_000_000;

/// The schema must be up to date.
pub async fn run(pool: &PgPool, attempts: i64) -> anyhow::Result<()> {
    ensure!(
        (1..=ATTEMPTS_MAX).contains(&attempts),
        "--attempts must be a number from 1 to {ATTEMPTS_MAX}"
    );
    let began = Instant::now();
    make_tenants(pool).await?;
    // Each event goes to all endpoints of its tenant.
    let events = (attempts / i64::from(ENDPOINTS_PER_TENANT)).max(1);
    let mut made = 0;
    while made < events {
        let upto = (made + EVENTS_PER_STATEMENT).min(events);
        make_deliveries(pool, made, upto, events).await?;
        made = upto;
        eprintln!(
            "{} attempts, {} s",
            made * i64::from(ENDPOINTS_PER_TENANT),
            began.elapsed().as_secs()
        );
    }
    make_statistics(pool).await?;
    rollup::run(pool).await?;
    for table in [
        "events",
        "attempts",
        "queue",
        "retries",
        "dead_letters",
        "minute_statistics",
    ] {
        // A name from the list above: vacuum takes no parameters.
        sqlx::raw_sql(AssertSqlSafe(format!("vacuum analyze postrider.{table}")))
            .execute(pool)
            .await?;
    }
    eprintln!("done in {} s", began.elapsed().as_secs());
    Ok(())
}

/// The first endpoint of each tenant is paused, so that it can have pending deliveries.
async fn make_tenants(pool: &PgPool) -> Result<(), sqlx::Error> {
    sqlx::query(
        "with tenant as (
             insert into postrider.tenants (slug, name)
             select 'seed-' || n, 'Seeded tenant ' || n from generate_series(1, $1) n
             on conflict (slug) where deleted_at is null do nothing returning id, slug
         ), type as (
             insert into postrider.event_types (name, matches)
             select name, array['*', 'seed.*', name] from unnest(array['seed.paid', 'seed.refunded', 'seed.shipped']) name
             on conflict (name) where deleted_at is null do nothing returning id
         ), schema as (
             insert into postrider.schemas (type_id, version, schema) select id, '2026-01-15', '{}' from type
         )
         insert into postrider.endpoints (tenant_id, public_id, shard, url, types, state)
         select t.id, 'ep_' || substring(md5(t.slug || n) for 24), n, 'https://' || t.slug || '.example.com/hook/' || n,
                '{seed.*}', case when n = 1 then 'paused' else 'active' end::postrider.endpoint_state
         from tenant t, generate_series(1, $2) n",
    )
    .bind(TENANTS)
    .bind(ENDPOINTS_PER_TENANT)
    .execute(pool)
    .await?;
    Ok(())
}

/// Spread over the last day. A quarter of the deliveries to a paused endpoint are pending; nearly all others are
/// delivered, and some of the last endpoint's are dead.
async fn make_deliveries(pool: &PgPool, from: i64, upto: i64, of: i64) -> Result<(), sqlx::Error> {
    sqlx::query(
        "with tenant as materialized (
             select id, slug, row_number() over (order by id) as number from postrider.tenants
             where slug like 'seed-%' and deleted_at is null
         ), schema as materialized (
             select s.id, s.type_id, y.name, row_number() over (order by y.id) as number
             from postrider.schemas s join postrider.event_types y on y.id = s.type_id
             where y.name like 'seed.%' and y.deleted_at is null
         ), event as (
             insert into postrider.events (id, tenant_id, type_id, schema_id, body)
             select postrider.uuid_at(clock_timestamp() - interval '24 hours' * (1 - n::float8 / $3)), t.id, s.type_id, s.id,
                    convert_to('{\"id\":\"evt\",\"type\":\"' || s.name || '\",\"data\":{\"object\":\"seed\",\"number\":' || n || '}}', 'UTF8')
             from generate_series($1 + 1, $2) n
             join tenant t on t.number = 1 + n % $4
             join schema s on s.number = 1 + n % 3
             returning id, tenant_id, type_id
         ), delivery as materialized (
             select v.id as event_id, e.id as endpoint_id, v.tenant_id, v.type_id, e.shard, e.state, random() as luck,
                    random() as speed, postrider.uuid_time(v.id) as at, e.id = max(e.id) over (partition by v.id) as is_last
             from event v join postrider.endpoints e on e.tenant_id = v.tenant_id
         ), waiting as (
             insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
             select endpoint_id, event_id, shard, tenant_id, type_id from delivery where state = 'paused' and luck < 0.15
         ), retrying as (
             insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, attempt, step, due_at)
             select endpoint_id, event_id, tenant_id, type_id, 1, 1, clock_timestamp() + interval '1 hour'
             from delivery where state = 'paused' and luck >= 0.15 and luck < 0.25
         ), attempt as (
             insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms, outcome,
                                             status, signature, response_head, final)
             select event_id, endpoint_id, 1, tenant_id, type_id, at, (10 * exp(3 * speed))::int + (speed > 0.99)::int * 900,
                    1 + is_bad::int, case when is_bad then 500 else 204 end, 't=1,v1=seed', 'HTTP/1.1',
                    case when state = 'paused' and luck < 0.25 then null
                         when is_bad then 'dead' else 'delivered' end::postrider.final_state
             from (select *, (is_last and luck < 0.02) or (state = 'paused' and luck < 0.25) as is_bad from delivery) d
             where not (state = 'paused' and luck < 0.15)
             returning event_id, endpoint_id, tenant_id, type_id, final, started_at
         ), dead as (
             insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, attempt, died_at)
             select endpoint_id, event_id, tenant_id, type_id, 'exhausted', 1, started_at from attempt where final = 'dead'
             returning endpoint_id, type_id, reason, tenant_id
         )
         insert into postrider.dead_letter_counts as c (endpoint_id, type_id, reason, tenant_id, count)
         select endpoint_id, type_id, reason, tenant_id, count(*) from dead group by 1, 2, 3, 4
         on conflict (endpoint_id, type_id, reason) do update set count = c.count + excluded.count",
    )
    .bind(from)
    .bind(upto)
    .bind(of as f64)
    .bind(i64::from(TENANTS))
    .execute(pool)
    .await?;
    Ok(())
}

/// As a dispatcher would have counted them, per endpoint and in total.
async fn make_statistics(pool: &PgPool) -> Result<(), sqlx::Error> {
    let bounds: Vec<i32> = BOUNDS_MS.iter().map(|ms| *ms as i32 + 1).collect();
    sqlx::query(
        "with counted as materialized (
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
         from total join spread using (endpoint_id, minute)",
    )
    .bind(Uuid::now_v7())
    .bind(bounds)
    .execute(pool)
    .await?;
    Ok(())
}
