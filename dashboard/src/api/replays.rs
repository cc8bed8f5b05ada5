//! Bulk replays: asked for, looked at, cancelled. The work itself is a job of the dispatcher.

use std::time::{Duration, Instant};

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use postrider_dispatcher::replays::{self, Ask, Part, RATE_DEFAULT, RATE_MAX, Replay, Sampled};
use postrider_proto::{
    DeadReason, DeliveryId, DeliveryState, EndpointState, ReplayKind, ReplayState, TenantId,
    limits::REPLAYS_RUNNING_PER_TENANT_MAX, routing::is_type_name,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::PgConnection;
use utoipa::ToSchema;

use super::{Answer, deliveries::parse_time, endpoint_rules::Faults};
use crate::{
    App, Shared,
    audit::{self, Action, Entry},
    auth::{Actor, Tenant},
    idempotency::{Claim, Work},
    input::{OptionalBody, Query},
    listing::{Page, PageQuery},
    openapi::shapes,
    problem::{Kind, Problem},
    settled::{self, all_settled},
    tables::{self, endpoints, event_types, is_public_id, random_public_id},
};

/// Of a dry run.
const SAMPLE: i64 = 10;
/// How long a cancellation waits for what was in line to be back where it was.
const TAKE_BACK_WAIT: Duration = Duration::from_secs(1);
const TAKE_BACK_POLL: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(as = NewReplay)]
pub(crate) struct ReplayForm {
    #[schema(schema_with = shapes::replay_kind_or_null)]
    pub(crate) kind: Option<String>,
    /// Null is all of the tenant's. What was never got is asked for by one.
    pub(crate) endpoint: Option<String>,
    /// Null is whatever has not arrived: dead letters, and those that wait for their next attempt.
    #[schema(schema_with = shapes::delivery_state_or_null)]
    pub(crate) state: Option<String>,
    #[schema(schema_with = shapes::type_or_null_plain)]
    pub(crate) r#type: Option<String>,
    #[schema(schema_with = shapes::dead_reason_or_null)]
    pub(crate) reason: Option<String>,
    /// Of events from then on.
    pub(crate) since: Option<String>,
    /// Of events before then.
    pub(crate) until: Option<String>,
    #[schema(schema_with = shapes::replay_rate_or_null)]
    pub(crate) rate_per_second: Option<i64>,
    /// Only counts, and shows a few.
    pub(crate) dry_run: bool,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Replay)]
pub(crate) struct ReplayView {
    id: String,
    #[schema(schema_with = shapes::replay_kind)]
    kind: ReplayKind,
    #[schema(schema_with = shapes::replay_state)]
    state: ReplayState,
    /// The filter, as it was asked for.
    endpoint: Option<String>,
    delivery_state: Option<String>,
    r#type: Option<String>,
    #[schema(schema_with = shapes::dead_reason_or_null)]
    reason: Option<DeadReason>,
    since: Option<DateTime<Utc>>,
    until: Option<DateTime<Utc>>,
    total: i64,
    /// Tried, or passed over because they were no longer there.
    done: i64,
    /// Not sent because it was cancelled: they are what they were before. A last few may still be on the wire.
    cancelled: i64,
    skipped: i64,
    /// Of those that were tried.
    retrying: i64,
    dead: i64,
    /// Asked for, and measured lately.
    rate_per_second: i32,
    done_per_second: Option<f32>,
    seconds_left: Option<i64>,
    asked_by: String,
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
            asked_by: replay.asked_by,
            created_at: replay.created_at,
            ended_at: replay.ended_at,
        }
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = ReplaySample)]
pub(crate) struct SampleView {
    /// The delivery that would be sent; of an event that the endpoint never got, the one that would come to be.
    delivery: String,
    pub(crate) event: String,
    pub(crate) r#type: String,
    endpoint: String,
    created_at: Option<DateTime<Utc>>,
}

impl From<Sampled> for SampleView {
    fn from(one: Sampled) -> Self {
        Self {
            delivery: DeliveryId {
                event: one.event_id,
                endpoint: one.endpoint_id,
            }
            .to_string(),
            event: one.chosen_id.unwrap_or_else(|| one.event_id.generated()),
            r#type: one.event_type,
            endpoint: one.endpoint,
            created_at: DateTime::from_timestamp_millis(one.event_id.unix_ms()),
        }
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = ReplayPreview)]
pub(crate) struct DryRun {
    dry_run: bool,
    pub(crate) total: i64,
    pub(crate) sample: Vec<SampleView>,
}

/// What a form asks for, checked.
pub(crate) struct Wanted {
    pub(crate) ask: Ask,
    pub(crate) rate: i32,
}

impl Wanted {
    /// What is counted goes through all of the tenant's events: by whom it is counted within its share.
    pub(crate) fn counts_as(&self) -> String {
        self.ask.tenant.0.to_string()
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
    // Before a connection is held.
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

/// Everything that is wrong with it, not only the first thing.
pub(crate) async fn read(app: &App, tenant: TenantId, form: &ReplayForm) -> Result<Wanted, Problem> {
    let mut faults = Faults::default();
    let mut word = |field: &str, value: &Option<String>, words: &[&'static str]| {
        let found = value
            .as_deref()
            .map(|text| words.iter().position(|word| *word == text));
        if found == Some(None) {
            faults.add(field, format!("must be one of {}", words.join(", ")));
        }
        found.flatten()
    };
    let kinds = ReplayKind::ALL
        .iter()
        .map(|kind| kind.as_str())
        .collect::<Vec<_>>();
    let kind = word("kind", &form.kind, &kinds).map_or(ReplayKind::Deliveries, |n| ReplayKind::ALL[n]);
    const STATES: [DeliveryState; 3] = [
        DeliveryState::Dead,
        DeliveryState::Delivered,
        DeliveryState::Pending,
    ];
    let state = word("state", &form.state, &STATES.map(DeliveryState::as_str)).map(|n| STATES[n]);
    let reasons = DeadReason::ALL.iter().map(|one| one.as_str()).collect::<Vec<_>>();
    let reason = word("reason", &form.reason, &reasons).map(|n| DeadReason::ALL[n]);
    let mut time = |field: &str, value: &Option<String>| {
        let time = value.as_deref().map(|text| parse_time(field, text)).transpose();
        time.unwrap_or_else(|problem| {
            faults.add(field, problem.detail);
            None
        })
    };
    let (since, until) = (time("since", &form.since), time("until", &form.until));
    if since.zip(until).is_some_and(|(since, until)| since >= until) {
        faults.add("until", "must be later than since");
    }
    let rate = faults.number("rate_per_second", form.rate_per_second, 1, i64::from(RATE_MAX));
    if kind == ReplayKind::Missing {
        if form.endpoint.is_none() {
            faults.add("endpoint", "what was never got is asked for by one endpoint");
        }
        if state.is_some() || reason.is_some() {
            faults.add("kind", "what was never got has no state and no reason");
        }
    } else if reason.is_some() && state.is_some_and(|state| state != DeliveryState::Dead) {
        faults.add("reason", "only dead letters have a reason");
    }
    let mut type_id = None;
    if let Some(name) = &form.r#type {
        let found = match is_type_name(name) {
            true => event_types::find(&app.pool, name).await?,
            false => None,
        };
        if found.is_none() {
            faults.add("type", "there is no such event type");
        }
        type_id = found.map(|row| row.id);
    }
    let mut endpoint = None;
    if let Some(public_id) = &form.endpoint {
        match endpoints::find(&app.pool, tenant, public_id).await? {
            Some(row) if row.settings.state == EndpointState::Disabled => {
                let reason = row.settings.state_reason.unwrap_or_default();
                return Err(Problem::conflict(format!(
                    "The endpoint is disabled ({reason}): enable it first."
                )));
            }
            Some(row) => endpoint = Some(row.id),
            None => faults.add("endpoint", "there is no such endpoint"),
        }
    }
    faults.done()?;
    Ok(Wanted {
        ask: Ask {
            tenant,
            kind,
            endpoint,
            state,
            type_id,
            reason,
            since,
            until,
        },
        rate: rate.unwrap_or(RATE_DEFAULT),
    })
}

/// How many, and a few of them. Nothing is changed.
pub(crate) async fn dry_run(
    app: &App,
    connection: &mut PgConnection,
    wanted: &Wanted,
) -> Result<DryRun, Problem> {
    let (parts, now) = count(app, connection, wanted).await?;
    let sample = replays::sample(connection, &wanted.ask, now, oldest(app, now), SAMPLE).await?;
    Ok(DryRun {
        dry_run: true,
        total: parts.iter().map(|part| part.total).sum(),
        sample: sample.into_iter().map(SampleView::from).collect(),
    })
}

/// The replay with its parts and its audit line, in the caller's transaction.
pub(crate) async fn begin(
    app: &App,
    connection: &mut PgConnection,
    actor: &Actor,
    wanted: &Wanted,
) -> Result<Replay, Problem> {
    let Wanted { ask, rate } = wanted;
    // Before the count, which may take long, and once more when others can't add to them.
    check_running(connection, ask.tenant).await?;
    let (parts, _) = count(app, connection, wanted).await?;
    if !tables::tenants::lock(&mut *connection, ask.tenant).await? {
        return Err(Problem::not_found("tenant"));
    }
    check_running(connection, ask.tenant).await?;
    let public_id = random_public_id("rpl");
    replays::begin(&mut *connection, &public_id, ask, &parts, *rate, &actor.0).await?;
    let replay = replays::find(&mut *connection, Some(ask.tenant), &public_id)
        .await?
        .ok_or_else(|| Problem::not_found("replay"))?;
    let detail = json!({
        "kind": ask.kind, "endpoint": replay.endpoint, "state": ask.state, "type": replay.event_type,
        "reason": ask.reason, "since": ask.since, "until": ask.until, "total": replay.total,
    });
    let entry = Entry {
        actor,
        action: Action::ReplayStarted,
        tenant: Some(ask.tenant),
        subject: &public_id,
        detail: Some(detail),
    };
    audit::write(connection, entry).await?;
    Ok(replay)
}

async fn check_running(connection: &mut PgConnection, tenant: TenantId) -> Result<(), Problem> {
    if replays::count_running(connection, tenant).await? < REPLAYS_RUNNING_PER_TENANT_MAX {
        return Ok(());
    }
    Err(Problem::conflict(format!(
        "The tenant has {REPLAYS_RUNNING_PER_TENANT_MAX} replays running, the most it can have. \
         Wait until one is done, or cancel one."
    )))
}

async fn count(
    app: &App,
    connection: &mut PgConnection,
    wanted: &Wanted,
) -> Result<(Vec<Part>, DateTime<Utc>), Problem> {
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(&mut *connection)
        .await?;
    let counted = replays::count(connection, &wanted.ask, now, oldest(app, now)).await;
    match counted {
        Ok(parts) => Ok((parts, now)),
        Err(error) if error.as_database_error().and_then(|e| e.code()).as_deref() == Some("57014") => {
            Err(Problem::new(
                Kind::Busy,
                "There are too many to be counted in time: narrow it down by endpoint or by time.",
            ))
        }
        Err(error) => Err(error.into()),
    }
}

/// Older events may be dropped at any moment.
fn oldest(app: &App, now: DateTime<Utc>) -> DateTime<Utc> {
    now - chrono::TimeDelta::from_std(app.defaults.retention).unwrap_or_default()
}

pub(crate) async fn find(app: &App, tenant: Option<TenantId>, id: &str) -> Result<Replay, Problem> {
    let found = match is_public_id("rpl", id) {
        true => replays::find(&app.pool, tenant, id).await?,
        false => None,
    };
    found.ok_or_else(|| Problem::not_found("replay"))
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

/// Answers with the replay as it is then: nothing of it goes out any more but what is on the wire. One that is over stays
/// as it is.
pub(crate) async fn cancel(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Answer<ReplayView> {
    Ok(Json(stop(&app, &actor, Some(tenant.id), &id).await?.into()))
}

pub(crate) async fn stop(
    app: &App,
    actor: &Actor,
    tenant: Option<TenantId>,
    id: &str,
) -> Result<Replay, Problem> {
    let replay = find(app, tenant, id).await?;
    let mut transaction = tables::begin(&app.pool).await?;
    let Some(shards) = replays::cancel(&mut transaction, replay.id).await? else {
        drop(transaction);
        return find(app, tenant, id).await;
    };
    let owner = tables::tenants::find(&mut *transaction, &replay.tenant).await?;
    let entry = Entry {
        actor,
        action: Action::ReplayCancelled,
        tenant: owner.map(|owner| owner.id),
        subject: &replay.public_id,
        detail: None,
    };
    audit::write(&mut transaction, entry).await?;
    let xid = settled::current(&mut transaction).await?;
    transaction.commit().await?;
    app.wake.now();
    all_settled(&app.pool, &shards, &xid).await?;
    taken_back(app, tenant, id).await
}

/// The replay once nothing of it is in line, or after a moment: what is on the wire may take its time.
async fn taken_back(app: &App, tenant: Option<TenantId>, id: &str) -> Result<Replay, Problem> {
    let began = Instant::now();
    loop {
        let replay = find(app, tenant, id).await?;
        if replay.in_line() == 0 || began.elapsed() >= TAKE_BACK_WAIT {
            return Ok(replay);
        }
        tokio::time::sleep(TAKE_BACK_POLL).await;
    }
}
