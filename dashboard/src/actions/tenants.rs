//! Tenants: create, change and delete them.

use postrider_dispatcher::erasure;
use postrider_proto::{
    api::TenantSettings,
    limits::{DESCRIPTION_BYTES_MAX, ROTATE_DAYS_MAX, ROTATE_DAYS_MIN},
    routing::is_tenant_slug,
};
use serde_json::{Map, Value, json};

use crate::{
    App,
    actions::sending::checked_reason,
    auth::Actor,
    http::{
        input::is_plain_text,
        problem::{Faults, Problem, excerpt},
        wait_until_applied::{self, settled},
    },
    tables::{
        self, api_keys,
        audit::{self, Action, Entry, changes},
        endpoints, random_public_id,
        tenants::TenantRow,
    },
};

const SECONDS_PER_DAY: u64 = 24 * 60 * 60;

/// Creates or updates the tenant; returns whether it is new.
pub(crate) async fn store(
    app: &App,
    actor: &Actor,
    slug: &str,
    form: TenantSettings,
) -> Result<(TenantRow, bool), Problem> {
    if !is_tenant_slug(slug) {
        return Err(Problem::invalid(
            "",
            format!(
                "`{}` is not a valid tenant id: start with a letter or digit and use at most 64 characters of A-Z a-z 0-9 _ . -",
                excerpt(slug)
            ),
        ));
    }
    let fits = |name: &String| is_plain_text(name, DESCRIPTION_BYTES_MAX);
    if !form.name.as_ref().is_none_or(fits) {
        return Err(Problem::invalid(
            "/name",
            format!("must be at most {DESCRIPTION_BYTES_MAX} bytes of text without control characters"),
        ));
    }
    let mut faults = Faults::default();
    let rotate_every_days = faults.number(
        "rotate_every_days",
        form.rotate_every_days,
        ROTATE_DAYS_MIN..=ROTATE_DAYS_MAX,
    );
    let days_kept = (app.defaults.retention.as_secs() / SECONDS_PER_DAY) as i64;
    let retention_days = faults.number("retention_days", form.retention_days, 1..=days_kept.max(1));
    faults.done()?;
    let mut transaction = tables::begin(&app.pool).await?;
    let before = tables::tenants::find_to_change(&mut *transaction, slug).await?;
    let (row, is_new) = tables::tenants::put(
        &mut *transaction,
        slug,
        form.name.as_deref(),
        rotate_every_days,
        retention_days,
        form.all_operational_events.unwrap_or(false),
    )
    .await?;
    let changed = before
        .as_ref()
        .map(|before| changes(settings(before), settings(&row)));
    let entry = Entry::new(actor, Action::TenantPut, Some(row.id), slug)
        .with(new_values(before.as_ref(), &row))
        .changed(&changed.unwrap_or_default());
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok((row, is_new))
}

fn settings(row: &TenantRow) -> [(&'static str, Value); 4] {
    [
        ("name", json!(row.name)),
        ("rotate_every_days", json!(row.rotate_every_days)),
        ("retention_days", json!(row.retention_days)),
        ("all_operational_events", json!(row.all_operational_events)),
    ]
}

/// The changed settings with their new values. A new tenant had none.
fn new_values(before: Option<&TenantRow>, now: &TenantRow) -> Value {
    let before_settings = before.map(settings);
    let is_changed = |(place, (_, value)): &(usize, (&str, Value))| match &before_settings {
        Some(before) => before[*place].1 != *value,
        None => !value.is_null() && *value != json!(false),
    };
    let mut changed: Map<String, Value> = settings(now)
        .into_iter()
        .enumerate()
        .filter(is_changed)
        .map(|(_, (name, value))| (name.to_owned(), value))
        .collect();
    if before.is_none() {
        changed.insert("created".to_owned(), json!(true));
    }
    Value::Object(changed)
}

/// Stops sending to the tenant's endpoints. Returns once no more requests to them are started.
pub(crate) async fn pause(
    app: &App,
    actor: &Actor,
    slug: &str,
    reason: Option<&str>,
) -> Result<TenantRow, Problem> {
    let reason = checked_reason(reason)?;
    set_pause(app, actor, slug, Some(reason)).await
}

/// Returns once all dispatchers know. Deliveries that became due meanwhile are sent.
pub(crate) async fn resume(app: &App, actor: &Actor, slug: &str) -> Result<TenantRow, Problem> {
    set_pause(app, actor, slug, None).await
}

/// `pause` is its reason, or none to resume.
async fn set_pause(
    app: &App,
    actor: &Actor,
    slug: &str,
    pause: Option<Option<&str>>,
) -> Result<TenantRow, Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    // Locked as for a new endpoint, which is therefore committed and stamped, or sees the change.
    let before = tables::tenants::find_to_change(&mut *transaction, slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))?;
    if before.paused_at.is_none() && pause.is_none() {
        return Ok(before);
    }
    let by = pause.is_some().then_some(actor.name.as_str());
    let row = tables::tenants::set_pause(&mut *transaction, before.id, by, pause.flatten()).await?;
    let mut shards = endpoints::touch_all(&mut *transaction, row.id).await?;
    shards.sort_unstable();
    shards.dedup();
    let action = match pause {
        Some(_) => Action::TenantPaused,
        None => Action::TenantResumed,
    };
    let detail = pause.map(|reason| json!({ "reason": reason }));
    let entry = Entry::new(actor, action, Some(row.id), slug).with(detail);
    audit::write(&mut transaction, entry).await?;
    wait_until_applied::commit_for_all(app, transaction, &shards).await?;
    Ok(row)
}

/// Returns the id of the erasure, which continues in the background.
pub(crate) async fn remove(app: &App, actor: &Actor, slug: &str) -> Result<String, Problem> {
    let tenant = tables::tenants::find(&app.pool, slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))?;
    let mut transaction = tables::begin(&app.pool).await?;
    if !tables::tenants::lock(&mut *transaction, tenant.id).await? {
        return Err(Problem::not_found("tenant"));
    }
    tables::tenants::delete(&mut *transaction, tenant.id).await?;
    let mut shards = endpoints::delete_all(&mut *transaction, tenant.id).await?;
    api_keys::revoke_all(&mut *transaction, tenant.id).await?;
    let erasure_id = random_public_id("era");
    erasure::begin(&mut transaction, tenant.id, &erasure_id, &actor.name).await?;
    let entry = Entry::new(actor, Action::TenantDeleted, Some(tenant.id), slug);
    audit::write(&mut transaction, entry).await?;
    let xid = wait_until_applied::current(&mut transaction).await?;
    transaction.commit().await?;
    app.wake.now();
    shards.sort_unstable();
    shards.dedup();
    for shard in shards {
        settled(&app.pool, shard, &xid).await?;
    }
    Ok(erasure_id)
}
