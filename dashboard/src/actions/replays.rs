//! Bulk replays: validate, count, start, cancel, resume. The dispatcher runs them as jobs.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use postrider_dispatcher::replays::{self, Ask, Part, RATE_DEFAULT, Replay, Sampled};
use postrider_proto::{
    DeadReason, DeliveryId, DeliveryState, EndpointState, Failure, ReplayKind, ReplayState, TenantId,
    api::{NewReplay, ReplayPreview, ReplaySample},
    limits::{REPLAY_RATE_MAX, REPLAYS_RUNNING_PER_TENANT_MAX},
    routing::is_type_name,
};
use serde_json::json;
use sqlx::{PgConnection, PgExecutor};

use crate::{
    App,
    actions::{delivery_filter::parse_time, tenants::lock_here},
    auth::Actor,
    http::{
        problem::{Faults, Kind, Problem, excerpt},
        wait_until_applied::{self, all_settled},
    },
    tables::{
        self,
        audit::{self, Action, Entry},
        endpoints::{self, EndpointRow},
        event_types, is_public_id, random_public_id,
    },
};

/// Deliveries shown by a dry run.
const SAMPLE: i64 = 10;
/// How long a cancellation waits for queued deliveries to be restored.
const TAKE_BACK_WAIT: Duration = Duration::from_secs(1);
const TAKE_BACK_POLL: Duration = Duration::from_millis(20);

fn sample_view(one: Sampled) -> ReplaySample {
    let delivery = DeliveryId {
        event: one.event_id,
        endpoint: one.endpoint_id,
    };
    ReplaySample {
        delivery: delivery.to_string(),
        event: one.chosen_id.unwrap_or_else(|| one.event_id.generated()),
        r#type: one.event_type,
        endpoint: one.endpoint,
        created_at: DateTime::from_timestamp_millis(one.event_id.unix_ms()),
    }
}

/// A validated request.
pub(crate) struct Wanted {
    pub(crate) ask: Ask,
    pub(crate) rate: i32,
}

impl Wanted {
    /// Counting scans all events of the tenant; this is the name it is limited by.
    pub(crate) fn counts_as(&self) -> String {
        self.ask.tenant.0.to_string()
    }
}

/// A replay to a disabled endpoint would skip everything.
fn check_enabled(row: &EndpointRow) -> Result<(), Problem> {
    let settings = &row.settings;
    if settings.state != EndpointState::Disabled {
        return Ok(());
    }
    let reason = settings.state_reason.as_deref().unwrap_or_default();
    Err(Problem::endpoint_disabled(format!(
        "The endpoint is disabled ({reason}). Enable it first."
    )))
}

/// Reports all errors, not only the first one.
pub(crate) async fn read(app: &App, tenant: TenantId, form: &NewReplay) -> Result<Wanted, Problem> {
    let mut faults = Faults::default();
    let mut wanted = read_filter_and_type(app, tenant, form, &mut faults).await?;
    if let Some(public_id) = &form.endpoint {
        match endpoints::find(&app.pool, tenant, public_id).await? {
            Some(row) => {
                check_enabled(&row)?;
                wanted.ask.endpoint = Some(row.id);
            }
            None => faults.add(
                "endpoint",
                format!("endpoint `{}` does not exist", excerpt(public_id)),
            ),
        }
    }
    faults.done()?;
    Ok(wanted)
}

/// Everything but the endpoint.
pub(super) async fn read_filter_and_type(
    app: &App,
    tenant: TenantId,
    form: &NewReplay,
    faults: &mut Faults,
) -> Result<Wanted, Problem> {
    let mut wanted = read_filter(tenant, form, faults);
    if let Some(name) = &form.r#type {
        let found = match is_type_name(name) {
            true => event_types::find(&app.pool, name).await?,
            false => None,
        };
        if found.is_none() {
            faults.add("type", format!("event type `{}` does not exist", excerpt(name)));
        }
        wanted.ask.type_id = found.map(|row| row.id);
    }
    Ok(wanted)
}

/// What can be checked without the database: everything but the type and the endpoint.
fn read_filter(tenant: TenantId, form: &NewReplay, faults: &mut Faults) -> Wanted {
    const STATES: [DeliveryState; 3] = [
        DeliveryState::Dead,
        DeliveryState::Delivered,
        DeliveryState::Pending,
    ];
    let kind = read_word(
        "kind",
        form.kind.as_deref(),
        ReplayKind::ALL,
        ReplayKind::as_str,
        faults,
    );
    let kind = kind.unwrap_or(ReplayKind::Deliveries);
    let state = read_word(
        "state",
        form.state.as_deref(),
        &STATES,
        DeliveryState::as_str,
        faults,
    );
    let reason = read_word(
        "reason",
        form.reason.as_deref(),
        DeadReason::ALL,
        DeadReason::as_str,
        faults,
    );
    let failure = read_failure(form.failure.as_deref(), faults);
    let mut time = |field: &str, value: &Option<String>| {
        let time = value.as_deref().map(|text| parse_time(field, text)).transpose();
        time.unwrap_or_else(|problem| {
            faults.add(field, problem.detail);
            None
        })
    };
    let (since, until) = (time("since", &form.since), time("until", &form.until));
    if since.zip(until).is_some_and(|(since, until)| since >= until) {
        faults.add("until", "must be later than `since`");
    }
    let rate = faults.number(
        "rate_per_second",
        form.rate_per_second,
        1..=REPLAY_RATE_MAX.into(),
    );
    let ask = Ask {
        tenant,
        kind,
        endpoint: None,
        state,
        type_id: None,
        reason,
        failure,
        since,
        until,
    };
    check_combination(form, &ask, faults);
    Wanted {
        ask,
        rate: rate.unwrap_or(RATE_DEFAULT),
    }
}

/// Fields that exclude each other.
fn check_combination(form: &NewReplay, ask: &Ask, faults: &mut Faults) {
    let (has_reason, has_failure) = (ask.reason.is_some(), ask.failure.is_some());
    if ask.kind == ReplayKind::Missing {
        if form.endpoint.is_none() {
            faults.add("endpoint", "is required for `kind: missing`");
        }
        if ask.state.is_some() || has_reason || has_failure {
            faults.add(
                "kind",
                "`missing` can't be combined with `state`, `reason` or `failure`",
            );
        }
    } else if ask.state.is_some_and(|state| state != DeliveryState::Dead) {
        for (field, is_given) in [("reason", has_reason), ("failure", has_failure)] {
            if is_given {
                faults.add(field, "is only allowed for dead letters");
            }
        }
    }
}

fn read_failure(given: Option<&str>, faults: &mut Faults) -> Option<Failure> {
    let given = given?;
    let failure = given.parse().ok();
    if failure.is_none() {
        faults.add(
            "failure",
            format!("`{}` is not a status code or an outcome", excerpt(given)),
        );
    }
    failure
}

fn read_word<T: Copy>(
    field: &str,
    given: Option<&str>,
    all: &[T],
    word: fn(T) -> &'static str,
    faults: &mut Faults,
) -> Option<T> {
    let given = given?;
    let found = all.iter().copied().find(|one| word(*one) == given);
    if found.is_none() {
        let words: Vec<&str> = all.iter().map(|one| word(*one)).collect();
        faults.add(
            field,
            format!("`{}` is not one of {}", excerpt(given), words.join(", ")),
        );
    }
    found
}

/// Counts the deliveries and returns a sample. Changes nothing.
pub(crate) async fn dry_run(
    app: &App,
    connection: &mut PgConnection,
    wanted: &Wanted,
) -> Result<ReplayPreview, Problem> {
    let (parts, now) = count(app, connection, wanted).await?;
    let sample = replays::sample(connection, &wanted.ask, now, oldest(app, now), SAMPLE).await?;
    Ok(ReplayPreview {
        dry_run: true,
        total: parts.iter().map(|part| part.total).sum(),
        sample: sample.into_iter().map(sample_view).collect(),
    })
}

/// Stores the replay, its parts and its audit entry in the caller's transaction.
pub(crate) async fn begin(
    app: &App,
    connection: &mut PgConnection,
    actor: &Actor,
    wanted: &Wanted,
) -> Result<Replay, Problem> {
    let Wanted { ask, rate } = wanted;
    // Checked before the count, which may take long, and again under the lock.
    check_running(connection, ask.tenant).await?;
    let (parts, _) = count(app, connection, wanted).await?;
    lock_here(connection, ask.tenant).await?;
    check_running(connection, ask.tenant).await?;
    let public_id = random_public_id("rpl");
    replays::begin(&mut *connection, &public_id, ask, &parts, *rate, &actor.name).await?;
    let replay = replays::find(&mut *connection, Some(ask.tenant), &public_id)
        .await?
        .ok_or_else(|| Problem::not_found("replay"))?;
    let detail = json!({
        "kind": ask.kind, "endpoint": replay.endpoint, "state": ask.state, "type": replay.event_type,
        "reason": ask.reason, "failure": ask.failure.map(|failure| failure.to_string()), "since": ask.since, "until": ask.until, "total": replay.total,
    });
    let entry = Entry::new(actor, Action::ReplayStarted, Some(ask.tenant), &public_id).with(detail);
    audit::write(connection, entry).await?;
    Ok(replay)
}

async fn check_running(connection: &mut PgConnection, tenant: TenantId) -> Result<(), Problem> {
    if replays::count_running(connection, tenant).await? < REPLAYS_RUNNING_PER_TENANT_MAX {
        return Ok(());
    }
    Err(Problem::limit_reached(format!(
        "The tenant already has {REPLAYS_RUNNING_PER_TENANT_MAX} replays running, which is the maximum. \
         Wait for one to finish, or cancel one."
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
                Kind::CountTimeout,
                "Counting took too long. Narrow the replay by endpoint or time.",
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
    find_in(&app.pool, tenant, id).await
}

async fn find_in(db: impl PgExecutor<'_>, tenant: Option<TenantId>, id: &str) -> Result<Replay, Problem> {
    let found = match is_public_id("rpl", id) {
        true => replays::find(db, tenant, id).await?,
        false => None,
    };
    found.ok_or_else(|| Problem::not_found("replay"))
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
    let owner = owner.map(|owner| owner.id);
    let entry = Entry::new(actor, Action::ReplayCancelled, owner, &replay.public_id);
    audit::write(&mut transaction, entry).await?;
    let xid = wait_until_applied::current(&mut transaction).await?;
    transaction.commit().await?;
    app.wake.now();
    all_settled(&app.pool, &shards, &xid).await?;
    taken_back(app, tenant, id).await
}

/// Runs a cancelled replay again: it goes on with what was not sent.
pub(crate) async fn resume(
    connection: &mut PgConnection,
    actor: &Actor,
    tenant: Option<TenantId>,
    id: &str,
) -> Result<Replay, Problem> {
    let missing = || Problem::not_found("replay");
    let replay = find_in(&mut *connection, tenant, id).await?;
    let owner = tables::tenants::find(&mut *connection, &replay.tenant).await?;
    let owner = owner.ok_or_else(missing)?.id;
    lock_here(connection, owner).await?;
    check_running(connection, owner).await?;
    if let Some(endpoint) = &replay.endpoint {
        let row = endpoints::find(&mut *connection, owner, endpoint).await?;
        row.map_or(Ok(()), |row| check_enabled(&row))?;
    }
    if !replays::resume(&mut *connection, replay.id).await? {
        return Err(Problem::conflict(match replay.state {
            ReplayState::Running => "The replay is running.",
            ReplayState::Done => "The replay has finished: there is nothing left to send.",
            ReplayState::Cancelled => "The replay is still being cancelled. Try again in a moment.",
        }));
    }
    let entry = Entry::new(actor, Action::ReplayResumed, Some(owner), &replay.public_id);
    audit::write(&mut *connection, entry).await?;
    find_in(connection, tenant, id).await
}

/// Changes the rate of a running replay, from its next step on.
pub(crate) async fn change_rate(
    connection: &mut PgConnection,
    actor: &Actor,
    tenant: Option<TenantId>,
    id: &str,
    rate_per_second: Option<i64>,
) -> Result<Replay, Problem> {
    let replay = find_in(&mut *connection, tenant, id).await?;
    let mut faults = Faults::default();
    if rate_per_second.is_none() {
        faults.add("rate_per_second", "is required");
    }
    let rate = faults.number("rate_per_second", rate_per_second, 1..=REPLAY_RATE_MAX.into());
    faults.done()?;
    let rate: i32 = rate.unwrap_or(RATE_DEFAULT);
    let owner = tables::tenants::find(&mut *connection, &replay.tenant).await?;
    let owner = owner.map(|owner| owner.id);
    if !replays::set_rate(&mut *connection, replay.id, rate).await? {
        return Err(Problem::conflict("The replay is not running."));
    }
    let rates = |rate: i32| [("rate_per_second", json!(rate))];
    let changes = audit::changes(rates(replay.rate_per_second), rates(rate));
    let entry = Entry::new(actor, Action::ReplayChanged, owner, &replay.public_id).changed(&changes);
    audit::write(&mut *connection, entry).await?;
    find_in(connection, tenant, id).await
}

/// Waits until nothing of the replay is queued, or briefly: attempts in flight may take their time.
async fn taken_back(app: &App, tenant: Option<TenantId>, id: &str) -> Result<Replay, Problem> {
    let began = Instant::now();
    loop {
        let replay = find(app, tenant, id).await?;
        if replay.queued() == 0 || began.elapsed() >= TAKE_BACK_WAIT {
            return Ok(replay);
        }
        tokio::time::sleep(TAKE_BACK_POLL).await;
    }
}
