//! Bulk replays: start, read, cancel. The dispatcher runs them as jobs.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use postrider_dispatcher::replays::{self, Replay};
use postrider_proto::{DeadReason, ReplayKind, ReplayState};
use serde::Serialize;
use utoipa::ToSchema;

use super::Answer;
use crate::{
    Shared,
    actions::replays::{ReplayForm, begin, dry_run, find, read, stop},
    auth::{Actor, Tenant},
    http::{
        idempotency::{Claim, Work},
        input::{OptionalBody, Query},
        pagination::{Page, PageQuery},
        problem::Problem,
        shapes,
    },
};

#[derive(Serialize, ToSchema)]
#[schema(as = Replay)]
pub(crate) struct ReplayView {
    id: String,
    #[schema(schema_with = shapes::replay_kind)]
    kind: ReplayKind,
    #[schema(schema_with = shapes::replay_state)]
    state: ReplayState,
    /// The filter as requested.
    endpoint: Option<String>,
    delivery_state: Option<String>,
    r#type: Option<String>,
    #[schema(schema_with = shapes::dead_reason_or_null)]
    reason: Option<DeadReason>,
    since: Option<DateTime<Utc>>,
    until: Option<DateTime<Utc>>,
    total: i64,
    /// Attempted, or skipped because they no longer existed.
    done: i64,
    /// Not sent because the replay was cancelled; restored to their previous state. A few may still be in flight.
    cancelled: i64,
    skipped: i64,
    /// Of the attempted ones.
    retrying: i64,
    dead: i64,
    /// The requested limit; `done_per_second` is the measured rate.
    rate_per_second: i32,
    done_per_second: Option<f32>,
    seconds_left: Option<i64>,
    created_by: String,
    created_at: DateTime<Utc>,
    ended_at: Option<DateTime<Utc>>,
}

impl From<Replay> for ReplayView {
    fn from(replay: Replay) -> Self {
        Self {
            done: replay.done(),
            cancelled: replay.cancelled(),
            done_per_second: replay.rate(),
            seconds_left: replay.seconds_left(),
            id: replay.public_id,
            kind: replay.kind,
            state: replay.state,
            endpoint: replay.endpoint,
            delivery_state: replay.delivery_state,
            r#type: replay.event_type,
            reason: replay.reason,
            since: replay.since,
            until: replay.until,
            total: replay.total,
            skipped: replay.skipped,
            retrying: replay.retrying,
            dead: replay.dead,
            rate_per_second: replay.rate_per_second,
            created_by: replay.asked_by,
            created_at: replay.created_at,
            ended_at: replay.ended_at,
        }
    }
}

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    claim: Claim,
    OptionalBody(form): OptionalBody<ReplayForm>,
) -> Result<Response, Problem> {
    let wanted = read(&app, tenant.id, &form).await?;
    // Before a connection is acquired.
    let _count = app.limits.counts.take(&wanted.counts_as()).await?;
    let mut work = Work::begin(&app, claim).await?;
    if form.dry_run {
        let preview = dry_run(&app, &mut work, &wanted).await?;
        return Ok(Json(preview).into_response());
    }
    let replay = begin(&app, &mut work, &actor, &wanted).await?;
    let response = work
        .commit(StatusCode::ACCEPTED, &ReplayView::from(replay))
        .await?;
    app.wake.now();
    Ok(response)
}

pub(crate) async fn get(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Answer<ReplayView> {
    Ok(Json(find(&app, Some(tenant.id), &id).await?.into()))
}

pub(crate) async fn list(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    Query(query): Query<PageQuery>,
) -> Answer<Page<ReplayView>> {
    let (limit, before) = (query.limit()?, query.after::<i64>()?.unwrap_or(i64::MAX));
    let rows = replays::list(&app.pool, Some(tenant.id), before, limit + 1).await?;
    Ok(Json(
        Page::cut(rows, limit, |replay| replay.id.0).map(ReplayView::from),
    ))
}

/// Responds with the current state of the replay: nothing more is sent except what is in flight. A finished replay is
/// left unchanged.
pub(crate) async fn cancel(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Answer<ReplayView> {
    Ok(Json(stop(&app, &actor, Some(tenant.id), &id).await?.into()))
}
