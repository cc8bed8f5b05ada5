//! `trials`: how many test events and probes an endpoint got in the current window, and when a probe last passed.

use std::time::Duration;

use postrider_dispatcher::bind::BindAll;
use postrider_proto::EndpointId;
use sqlx::PgExecutor;

use crate::Pool;

/// How many of one kind are allowed in a window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allowance {
    pub(crate) kind: &'static str,
    pub(crate) most: i32,
    pub(crate) within: Duration,
}

/// Uses up one. If none is left, returns how long until the next one.
pub(crate) async fn take(
    pool: &Pool,
    endpoint: EndpointId,
    allowance: Allowance,
) -> sqlx::Result<Result<(), Duration>> {
    let taken: Option<i32> = sqlx::query_scalar(
        "insert into postrider.trials as t (endpoint_id, kind, since, used) values ($1, $2, clock_timestamp(), 1)
         on conflict (endpoint_id, kind) do update set
            used = case when t.since < clock_timestamp() - make_interval(secs => $4) then 1 else t.used + 1 end,
            since = case when t.since < clock_timestamp() - make_interval(secs => $4) then clock_timestamp() else t.since end
         where t.used < $3 or t.since < clock_timestamp() - make_interval(secs => $4)
         returning used",
    )
    .bind_all((endpoint, allowance.kind, allowance.most, allowance.within.as_secs_f64()))
    .fetch_optional(pool)
    .await?;
    match taken {
        Some(_) => Ok(Ok(())),
        None => Ok(Err(time_left(pool, endpoint, allowance).await?)),
    }
}

/// The probe that was taken has passed.
pub(crate) async fn note_pass(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    allowance: Allowance,
) -> sqlx::Result<()> {
    sqlx::query(
        "update postrider.trials set passed_at = clock_timestamp() where endpoint_id = $1 and kind = $2",
    )
    .bind_all((endpoint, allowance.kind))
    .execute(db)
    .await?;
    Ok(())
}

async fn time_left(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    allowance: Allowance,
) -> sqlx::Result<Duration> {
    let seconds: Option<f64> = sqlx::query_scalar(
        "select extract(epoch from since + make_interval(secs => $3) - clock_timestamp())::float8
         from postrider.trials where endpoint_id = $1 and kind = $2",
    )
    .bind_all((endpoint, allowance.kind, allowance.within.as_secs_f64()))
    .fetch_optional(db)
    .await?;
    Ok(Duration::from_secs_f64(
        seconds.unwrap_or(1.0).clamp(1.0, 3_600.0),
    ))
}
