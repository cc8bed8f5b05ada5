//! Results of forms that are shown once, after a redirect: a new API key, the response to a test event. Reloading the page
//! repeats neither the form nor the result.
//! Invariant: a result is encrypted, and only the session that submitted the form gets it.

use std::time::Duration;

use postrider_dispatcher::sealed::result_scope;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;
use sqlx::PgExecutor;
use tokio::time::interval;
use tokio_util::sync::CancellationToken;

use crate::{
    App, Shared,
    auth::Session,
    http::problem::Problem,
    tables::{form_results, is_public_id, random_public_id},
};

const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// A larger result is not kept; the page then shows none.
const BYTES_MAX: usize = 256 * 1024;

/// Stores the result and returns its id, for the address of the redirect. `kind` is the page that may show it.
pub(crate) async fn keep(
    app: &App,
    db: impl PgExecutor<'_>,
    session: &Session,
    kind: &str,
    result: &impl Serialize,
) -> Result<String, Problem> {
    let id = random_public_id("res");
    let text = serde_json::to_vec(&(kind, result))
        .map_err(|error| Problem::internal("could not write a result", error))?;
    if text.len() <= BYTES_MAX {
        let scope = result_scope(&id, &session.token_hash());
        let sealed = app.vault.seal_response(&scope, &text);
        form_results::insert(db, &id, &session.token_hash(), &sealed).await?;
    }
    Ok(id)
}

/// None if it was shown before, has expired or belongs to another session or page.
pub(crate) async fn take<T: DeserializeOwned>(
    app: &App,
    session: &Session,
    kind: &str,
    id: &str,
) -> Result<Option<T>, Problem> {
    if !is_public_id("res", id) {
        return Ok(None);
    }
    let Some(sealed) = form_results::take(&app.home, id, &session.token_hash()).await? else {
        return Ok(None);
    };
    let scope = result_scope(id, &session.token_hash());
    let opened = app.vault.open_response(&scope, &sealed).ok();
    let read = opened.and_then(|text| serde_json::from_slice::<(String, Box<RawValue>)>(&text).ok());
    Ok(read
        .filter(|(of, _)| of == kind)
        .and_then(|(_, result)| serde_json::from_str(result.get()).ok()))
}

/// Deletes results that were never shown, until `stop`.
pub(crate) async fn sweep(app: Shared, stop: CancellationToken) {
    let mut every = interval(SWEEP_EVERY);
    loop {
        tokio::select! {
            _ = every.tick() => {}
            () = stop.cancelled() => return,
        }
        if let Err(error) = form_results::delete_expired(&app.pool).await {
            tracing::debug!(%error, "failed to delete expired form results");
        }
    }
}
