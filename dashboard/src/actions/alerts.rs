//! Alerts of endpoints: set, find, delete.

use postrider_proto::{api::AlertSettings, limits::ALERT_DEAD_LETTERS_MAX, routing::matching_patterns};
use serde_json::json;

use crate::{
    App,
    actions::endpoints::lock_endpoint,
    auth::{Actor, Tenant},
    http::problem::{Faults, Problem},
    tables::{
        self,
        alerts::{self, AlertRow},
        audit::{self, Action, Entry},
        endpoints,
    },
};

/// What an alert emits.
const EVENT_TYPE: &str = "postrider.alert.dead_letters";

/// Whether anybody would be told: some endpoint must subscribe to the event type of alerts.
pub(crate) async fn has_receiver(app: &App, tenant: &Tenant) -> Result<bool, Problem> {
    let patterns = matching_patterns(EVENT_TYPE);
    Ok(alerts::has_receiver(&app.pool, tenant.id, &patterns).await?)
}

pub(crate) async fn put(
    app: &App,
    actor: &Actor,
    tenant: &Tenant,
    endpoint: &str,
    form: &AlertSettings,
) -> Result<AlertRow, Problem> {
    let mut faults = Faults::default();
    let threshold: Option<i64> = faults.number(
        "dead_letters",
        Some(form.dead_letters),
        1..=ALERT_DEAD_LETTERS_MAX,
    );
    faults.done()?;
    let mut transaction = tables::begin(&app.pool).await?;
    let row = lock_endpoint(&mut transaction, tenant.id, endpoint).await?;
    let alert = alerts::put(&mut *transaction, row.id, threshold.unwrap_or(1), &actor.name).await?;
    let entry = Entry::new(actor, Action::AlertPut, Some(tenant.id), endpoint)
        .with(json!({ "dead_letters": alert.dead_letters }));
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(alert)
}

pub(crate) async fn find(app: &App, tenant: &Tenant, endpoint: &str) -> Result<AlertRow, Problem> {
    let row = endpoints::find(&app.pool, tenant.id, endpoint)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let alert = alerts::find(&app.pool, row.id).await?;
    alert.ok_or_else(|| Problem::not_found("alert"))
}

pub(crate) async fn delete(app: &App, actor: &Actor, tenant: &Tenant, endpoint: &str) -> Result<(), Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    let row = lock_endpoint(&mut transaction, tenant.id, endpoint).await?;
    if !alerts::delete(&mut *transaction, row.id).await? {
        return Err(Problem::not_found("alert"));
    }
    let entry = Entry::new(actor, Action::AlertDeleted, Some(tenant.id), endpoint);
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(())
}
