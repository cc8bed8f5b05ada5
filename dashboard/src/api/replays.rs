//! Bulk replays: start, read, change, cancel, resume. The dispatcher runs them as jobs.

use axum::{
    Json,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use postrider_dispatcher::replays;
use postrider_proto::api::{NewReplay, Replay, ReplayPreview, ReplaySettings};

use super::ApiResult;
use crate::{
    actions::{
        self,
        replays::{begin, change_rate, dry_run, find, read, stop},
    },
    auth::{Call, Rule::Own},
    http::{
        idempotency::{Claim, Work},
        input::{Body, OptionalBody, Query},
        pagination::{Page, PageQuery, cut},
        problem::Problem,
    },
    openapi::Operation,
    tables,
};

const REPLAYS: &str = "/v1/tenants/{tenant}/replays";
const REPLAY: &str = "/v1/tenants/{tenant}/replays/{replay}";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post(Own, REPLAYS, create)
            .named("startReplay", "Start a bulk replay")
            .describe(
                "Starts a job that survives restarts. Live deliveries go first: replays use at most a quarter of an \
                 endpoint's concurrency. `kind: missing` sends events that the endpoint missed. Returns 409 \
                 `limit-reached` if too many replays of the tenant are running.",
            )
            .may_accept::<NewReplay>()
            .returns::<Replay>(202, "The replay was started.")
            .returns::<ReplayPreview>(200, "The result of a dry run.")
            .fails_with(&[409]),
        Operation::read(Own, REPLAYS, list)
            .named("listReplays", "List replays")
            .returns_page::<Replay>("A page of replays, newest first."),
        Operation::get(Own, REPLAY, get)
            .named("getReplay", "Retrieve a replay")
            .returns::<Replay>(200, "The replay with its progress."),
        Operation::delete(Own, REPLAY, cancel)
            .named("cancelReplay", "Cancel a replay")
            .describe(
                "Responds once no more of its requests are started. Queued deliveries are restored to their previous \
                 state: dead, delivered, waiting for a retry, or absent. Requests in flight finish.",
            )
            .returns::<Replay>(200, "The replay in its current state."),
        Operation::patch(Own, REPLAY, patch)
            .named("updateReplay", "Change the rate of a running replay")
            .accepts::<ReplaySettings>()
            .returns::<Replay>(200, "The replay with its new rate.")
            .fails_with(&[409]),
        Operation::post(Own, "/v1/tenants/{tenant}/replays/{replay}/resume", resume)
            .named("resumeReplay", "Resume a cancelled replay")
            .describe(
                "Goes on with the deliveries that were not sent. Returns 409 if the replay is not cancelled or is still \
                 being cancelled, and `limit-reached` if too many replays of the tenant are running.",
            )
            .returns::<Replay>(202, "The replay is running again.")
            .fails_with(&[409]),
    ]
}

fn view(replay: replays::Replay) -> Replay {
    Replay {
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
        failure: replay.failure.map(|failure| failure.to_string()),
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

async fn create(
    call: Call,
    claim: Claim,
    OptionalBody(form): OptionalBody<NewReplay>,
) -> Result<Response, Problem> {
    let wanted = read(&call.app, call.tenant.id, &form).await?;
    // Before a connection is acquired.
    let _count = call.app.limits.counts.take(&wanted.counts_as()).await?;
    let mut work = Work::begin(&call.app, claim).await?;
    if form.dry_run {
        let preview = dry_run(&call.app, &mut work, &wanted).await?;
        return Ok(Json(preview).into_response());
    }
    let replay = begin(&call.app, &mut work, &call.actor, &wanted).await?;
    let response = work.commit(StatusCode::ACCEPTED, &view(replay)).await?;
    call.app.wake.now();
    Ok(response)
}

async fn get(call: Call, Path((_, id)): Path<(String, String)>) -> ApiResult<Replay> {
    Ok(Json(view(find(&call.app, Some(call.tenant.id), &id).await?)))
}

async fn list(call: Call, Query(query): Query<PageQuery>) -> ApiResult<Page<Replay>> {
    let (limit, before) = (query.limit()?, query.after::<i64>()?.unwrap_or(i64::MAX));
    let rows = replays::list(&call.app.pool, Some(call.tenant.id), before, limit + 1).await?;
    Ok(Json(cut(rows, limit, |replay| replay.id.0).map(view)))
}

async fn patch(
    call: Call,
    Path((_, id)): Path<(String, String)>,
    Body(form): Body<ReplaySettings>,
) -> ApiResult<Replay> {
    let mut transaction = tables::begin(&call.app.pool).await?;
    let rate = form.rate_per_second;
    let replay = change_rate(&mut transaction, &call.actor, Some(call.tenant.id), &id, rate).await?;
    transaction.commit().await?;
    Ok(Json(view(replay)))
}

async fn resume(
    call: Call,
    Path((_, id)): Path<(String, String)>,
    claim: Claim,
) -> Result<Response, Problem> {
    let mut work = Work::begin(&call.app, claim).await?;
    let replay = actions::replays::resume(&mut work, &call.actor, Some(call.tenant.id), &id).await?;
    let response = work.commit(StatusCode::ACCEPTED, &view(replay)).await?;
    call.app.wake.now();
    Ok(response)
}

/// Responds with the current state of the replay: nothing more is sent except what is in flight. A finished replay is
/// left unchanged.
async fn cancel(call: Call, Path((_, id)): Path<(String, String)>) -> ApiResult<Replay> {
    Ok(Json(view(
        stop(&call.app, &call.actor, Some(call.tenant.id), &id).await?,
    )))
}
