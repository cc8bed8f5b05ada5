//! Tenants: create, change and delete them.

use postrider_dispatcher::erasure;
use postrider_proto::{
    Shard, TenantId,
    api::TenantSettings,
    limits::{DESCRIPTION_BYTES_MAX, ROTATE_DAYS_MAX, ROTATE_DAYS_MIN},
    routing::is_tenant_slug,
};
use serde_json::{Map, Value, json};
use sqlx::PgConnection;

use crate::{
    App, Shared,
    actions::sending::checked_reason,
    auth::Actor,
    http::{
        cells::{Here, Purpose, app_of, copies, name_of},
        input::is_plain_text,
        problem::{Faults, Kind, Problem, excerpt},
        wait_until_applied::{self, Xid, settled},
    },
    tables::{
        self, api_keys,
        audit::{self, Action, Entry, changes},
        cells::{self, Copied, HOME},
        endpoints, random_public_id,
        tenants::TenantRow,
    },
};

const SECONDS_PER_DAY: u64 = 24 * 60 * 60;

/// Creates or updates the tenant; returns whether it is new. Its cell has it by then.
pub(crate) async fn store(
    app: &Shared,
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
    let cell = match &before {
        Some(before) => stays_in(app, before, form.cell.as_deref()).map(|()| before.cell_id)?,
        None => cell_for_new(app, &mut transaction, form.cell.as_deref()).await?,
    };
    let (row, is_new) = tables::tenants::put(
        &mut *transaction,
        slug,
        form.name.as_deref(),
        rotate_every_days,
        retention_days,
        form.all_operational_events.unwrap_or(false),
        cell,
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
    app.cells.forget(slug);
    copies::of_tenant(app, Copied::Tenant(row.id), row.cell_id).await?;
    Ok((row, is_new))
}

/// A tenant changes its cell by a move.
fn stays_in(app: &App, tenant: &TenantRow, cell: Option<&str>) -> Result<(), Problem> {
    let now = name_of(app, tenant.cell_id).unwrap_or_else(|| "home".to_owned());
    match cell.is_none_or(|cell| cell == now) {
        true => Ok(()),
        false => Err(Problem::conflict(format!(
            "The tenant lives in cell {now}. Only a move can change that."
        ))),
    }
}

async fn cell_for_new(app: &App, connection: &mut PgConnection, name: Option<&str>) -> Result<i16, Problem> {
    if name.is_none() && !app.cells.any() {
        return Ok(HOME);
    }
    let found = cells::for_new_tenant(connection, name).await?;
    found.ok_or_else(|| match name {
        Some(name) => Problem::invalid("/cell", format!("there is no open cell {:?}", excerpt(name))),
        None => Problem::conflict("All cells are draining: no new tenants can be created."),
    })
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

/// Before something is added to the tenant, which only its own cell may do.
pub(crate) async fn lock_here(connection: &mut PgConnection, tenant: TenantId) -> Result<(), Problem> {
    match tables::tenants::lock_here(connection, tenant).await? {
        Some(true) => Ok(()),
        Some(false) => Err(has_left()),
        None => Err(Problem::not_found("tenant")),
    }
}

fn has_left() -> Problem {
    Problem::new(
        Kind::OtherCell,
        "The tenant lives in another cell, or is being moved there. Try again shortly.",
    )
}

/// Stops sending to the tenant's endpoints. Returns once no more requests to them are started.
pub(crate) async fn pause(
    app: &Shared,
    actor: &Actor,
    slug: &str,
    reason: Option<&str>,
) -> Result<TenantRow, Problem> {
    let reason = checked_reason(reason)?;
    set_pause(app, actor, slug, Some(reason)).await
}

/// Returns once all dispatchers know. Deliveries that became due meanwhile are sent.
pub(crate) async fn resume(app: &Shared, actor: &Actor, slug: &str) -> Result<TenantRow, Problem> {
    set_pause(app, actor, slug, None).await
}

/// `pause` is its reason, or none to resume.
async fn set_pause(
    app: &Shared,
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
    let action = match pause {
        Some(_) => Action::TenantPaused,
        None => Action::TenantResumed,
    };
    let detail = pause.map(|reason| json!({ "reason": reason }));
    let entry = Entry::new(actor, action, Some(row.id), slug).with(detail);
    audit::write(&mut transaction, entry).await?;
    if row.cell_id != HOME {
        transaction.commit().await?;
        copies::of_tenant(app, Copied::Tenant(row.id), row.cell_id).await?;
        transaction = tables::begin(&app_of(app, row.cell_id)?.pool).await?;
    }
    let mut shards = endpoints::touch_all(&mut *transaction, row.id).await?;
    shards.sort_unstable();
    shards.dedup();
    wait_until_applied::commit_for_all(&*app_of(app, row.cell_id)?, transaction, &shards).await?;
    Ok(row)
}

/// A tenant whose deletion has begun.
struct Removed {
    erasure: String,
    shards: Vec<Shard>,
    xid: Xid,
}

/// Returns the id of the erasure, which continues in the background.
pub(crate) async fn remove(app: &Shared, actor: &Actor, slug: &str) -> Result<String, Problem> {
    let tenant = tables::tenants::find(&app.pool, slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))?;
    let there = Here::of_tenant(app, slug, Purpose::Change).await?.app;
    // First in its cell: if that fails, or this process ends before home has it, the request can be repeated.
    let away = match tenant.cell_id {
        HOME => None,
        _ => Some(remove_in_cell(&there, actor, &tenant).await?),
    };
    let mut transaction = tables::begin(&app.pool).await?;
    if !tables::tenants::lock(&mut *transaction, tenant.id).await? {
        return Err(Problem::not_found("tenant"));
    }
    // A move that began meanwhile would take along what is erased here.
    if tables::tenants::is_moving(&mut *transaction, tenant.id).await? {
        return Err(Problem::new(
            Kind::Busy,
            "The tenant is being moved to another cell. Delete it when it has arrived.",
        ));
    }
    tables::tenants::delete(&mut *transaction, tenant.id).await?;
    api_keys::revoke_all(&mut *transaction, tenant.id).await?;
    let entry = Entry::new(actor, Action::TenantDeleted, Some(tenant.id), slug);
    audit::write(&mut transaction, entry).await?;
    let removed = match away {
        Some(removed) => removed,
        None => begin_erasure(&mut transaction, actor, tenant.id).await?,
    };
    transaction.commit().await?;
    app.cells.forget(slug);
    there.wake.now();
    for shard in removed.shards {
        settled(&there.pool, shard, &removed.xid).await?;
    }
    Ok(removed.erasure)
}

async fn remove_in_cell(there: &App, actor: &Actor, tenant: &TenantRow) -> Result<Removed, Problem> {
    let mut transaction = tables::begin(&there.pool).await?;
    let is_here = tables::tenants::lock_here(&mut *transaction, tenant.id).await?;
    if is_here == Some(false) {
        return Err(has_left());
    }
    if is_here.is_none()
        && let Some(erasure) = erasure::find_of_tenant(&mut *transaction, tenant.id).await?
    {
        // By an earlier request, which did not get further.
        return Ok(Removed {
            erasure,
            shards: Vec::new(),
            xid: wait_until_applied::current(&mut transaction).await?,
        });
    }
    tables::tenants::delete(&mut *transaction, tenant.id).await?;
    let removed = begin_erasure(&mut transaction, actor, tenant.id).await?;
    transaction.commit().await?;
    Ok(removed)
}

async fn begin_erasure(
    connection: &mut PgConnection,
    actor: &Actor,
    tenant: TenantId,
) -> Result<Removed, Problem> {
    let mut shards = endpoints::delete_all(&mut *connection, tenant).await?;
    shards.sort_unstable();
    shards.dedup();
    let id = random_public_id("era");
    erasure::begin(connection, tenant, &id, &actor.name).await?;
    Ok(Removed {
        erasure: id,
        shards,
        xid: wait_until_applied::current(connection).await?,
    })
}
