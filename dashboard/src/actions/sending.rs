//! Stops all sending and resumes it.

use std::time::Duration;

use postrider_dispatcher::sending::{self, IDENTITY_HIDDEN, SendingState};
use postrider_proto::{
    Shard, TenantId,
    api::SendingSettings,
    limits::{DESCRIPTION_BYTES_MAX, SHARDS},
};
use serde_json::json;

use crate::{
    App, Shared,
    auth::Actor,
    http::{
        cells::{ask_within, name_of},
        input::is_plain_text,
        problem::{Kind, Problem},
        wait_until_applied,
    },
    tables::{
        self,
        audit::{self, Action, Entry},
        tenants,
    },
};

/// For a cell to change its switch and to hear of its dispatchers.
const SET_TIME_MAX: Duration = Duration::from_secs(12);

/// Returns once every dispatcher has applied it, in all cells: after a stop, no more requests are started.
pub(crate) async fn set(
    app: &Shared,
    actor: &Actor,
    form: &SendingSettings,
) -> Result<SendingState, Problem> {
    if !app.cells.any() {
        return set_in(app, actor, form).await;
    }
    let (actor, form) = (actor.clone(), form.clone());
    // A refusal of one cell is a value: it must not interrupt the others.
    let answers = ask_within(app, SET_TIME_MAX, move |app| {
        let (actor, form) = (actor.clone(), form.clone());
        async move { Ok(set_in(&app, &actor, &form).await) }
    })
    .await?;
    let mut unset = answers.silent;
    let mut first = None;
    for (cell, answer) in answers.found {
        match answer {
            Ok(state) => first = first.or(Some(state)),
            Err(problem) if problem.status().is_client_error() => return Err(problem),
            Err(_) => unset.extend(name_of(app, cell)),
        }
    }
    match first {
        Some(state) if unset.is_empty() => Ok(state),
        _ => Err(Problem::new(
            Kind::ChangePending,
            format!("Not confirmed by cell {}. Repeat the request.", unset.join(", ")),
        )),
    }
}

async fn set_in(app: &App, actor: &Actor, form: &SendingSettings) -> Result<SendingState, Problem> {
    let reason = checked_reason(form.reason.as_deref())?;
    let mut transaction = tables::begin(&app.pool).await?;
    let before = sending::lock(&mut transaction).await?;
    let action = match form.stopped {
        true => {
            sending::stop(&mut *transaction, &actor.name, reason).await?;
            Action::SendingStopped
        }
        false if before.restored && !form.confirm_restored => return Err(not_confirmed(&before)),
        false if !before.stopped => return Ok(before),
        false => {
            sending::resume(&mut *transaction).await?;
            Action::SendingResumed
        }
    };
    let detail = match form.stopped {
        true => json!({ "reason": reason }),
        false => json!({ "confirmed_restored": before.restored }),
    };
    let entry = Entry::new(actor, action, None, "sending").with(detail);
    audit::write(&mut transaction, entry).await?;
    let after = sending::state(&mut *transaction).await?;
    let shards: Vec<Shard> = (0..SHARDS).map(Shard).collect();
    wait_until_applied::commit_for_all(app, transaction, &shards).await?;
    Ok(after)
}

/// A reason that people gave, for a stop or a pause.
pub(crate) fn checked_reason(reason: Option<&str>) -> Result<Option<&str>, Problem> {
    let reason = reason.map(str::trim).filter(|text| !text.is_empty());
    match reason.is_none_or(|text| is_plain_text(text, DESCRIPTION_BYTES_MAX)) {
        true => Ok(reason),
        false => Err(Problem::invalid(
            "/reason",
            format!("must be at most {DESCRIPTION_BYTES_MAX} bytes of text without control characters"),
        )),
    }
}

fn not_confirmed(state: &SendingState) -> Problem {
    if state.identity_hidden {
        return Problem::new(
            Kind::SendingStopped,
            format!(
                "{IDENTITY_HIDDEN}. Grant it that right: sending continues within seconds. Or, if no other installation sends \
                 from a copy of this database, repeat the request with `confirm_restored`."
            ),
        );
    }
    Problem::new(
        Kind::SendingStopped,
        "This database is a restored copy. If the original still runs, endpoints would receive everything twice. To send from \
         here, repeat the request with `confirm_restored`.",
    )
}

/// Test requests are real requests to customers: none are sent while all sending is stopped or the tenant is paused.
pub(crate) async fn require_sending(app: &App, tenant: TenantId) -> Result<(), Problem> {
    let state = sending::state(&app.pool).await?;
    let is_paused = tenants::slug_and_pause(&app.pool, tenant)
        .await?
        .is_some_and(|(_, is_paused)| is_paused);
    match (state.restored, state.stopped) {
        (true, _) if state.identity_hidden => Err(Problem::new(
            Kind::SendingStopped,
            format!("{IDENTITY_HIDDEN}: nothing is sent."),
        )),
        (true, _) => Err(Problem::new(
            Kind::SendingStopped,
            "This database is a restored copy: nothing is sent until an operator confirms it.",
        )),
        (false, true) => Err(Problem::new(
            Kind::SendingStopped,
            "All sending is stopped by an operator. Try again when it is resumed.",
        )),
        (false, false) if is_paused => Err(Problem::new(
            Kind::TenantPaused,
            "Sending to this tenant is paused by the operator. Try again when it is resumed.",
        )),
        (false, false) => Ok(()),
    }
}
