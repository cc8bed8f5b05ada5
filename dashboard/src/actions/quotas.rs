//! Quotas of tenants: how much they may emit and store.

use postrider_dispatcher::usage;
use postrider_proto::{
    TenantId,
    api::{QuotaSettings, Quotas},
    limits::{EMITS_PER_MINUTE_MAX, STORED_BYTES_MAX},
};
use serde_json::{Value, json};

use crate::{
    App, Shared,
    auth::Actor,
    http::{
        cells::{app_of, copies},
        problem::{Faults, Problem},
    },
    tables::{
        self,
        audit::{self, Action, Entry, changes},
        cells::Copied,
        quotas::{self, QuotaRow},
        tenants,
    },
};

/// Time for measuring what a tenant has stored. A larger tenant is measured within an hour, by a dispatcher.
const MEASURE_AT_ONCE: &str = "set local statement_timeout = '2s'";

pub(crate) fn view(row: &QuotaRow) -> Quotas {
    Quotas {
        emits_per_minute: row.emits_per_minute,
        stored_bytes: row.stored_bytes,
        emits_this_minute: row.emits_used,
        stored_bytes_used: row.stored_bytes_used,
        is_measured: row.is_measured,
    }
}

pub(crate) async fn put(
    app: &Shared,
    actor: &Actor,
    slug: &str,
    form: &QuotaSettings,
) -> Result<QuotaRow, Problem> {
    let mut faults = Faults::default();
    let emits: Option<i32> = faults.number(
        "emits_per_minute",
        form.emits_per_minute,
        1..=EMITS_PER_MINUTE_MAX,
    );
    let bytes: Option<i64> = faults.number("stored_bytes", form.stored_bytes, 1..=STORED_BYTES_MAX);
    faults.done()?;
    let mut transaction = tables::begin(&app.pool).await?;
    let tenant = tenants::find_to_change(&mut *transaction, slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))?;
    let before = quotas::find(&mut *transaction, tenant.id).await?;
    quotas::put(&mut *transaction, tenant.id, emits, bytes).await?;
    let row = quotas::find(&mut *transaction, tenant.id).await?;
    let changed = changes(audited(&before), audited(&row));
    let entry = Entry::new(actor, Action::QuotasPut, Some(tenant.id), slug).changed(&changed);
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    copies::of_tenant(app, Copied::Tenant(tenant.id), tenant.cell_id).await?;
    let there = app_of(app, tenant.cell_id)?;
    if bytes.is_some() && !quotas::find(&there.pool, tenant.id).await?.is_measured {
        measure(&there, tenant.id).await?;
    }
    Ok(quotas::find(&there.pool, tenant.id).await?)
}

async fn measure(app: &App, tenant: TenantId) -> Result<(), Problem> {
    const STATEMENT_TIMEOUT: &str = "57014";
    let mut transaction = tables::begin(&app.pool).await?;
    sqlx::query(MEASURE_AT_ONCE).execute(&mut *transaction).await?;
    match usage::measure(&mut transaction, tenant).await {
        Ok(()) => Ok(transaction.commit().await?),
        Err(error) => match error.as_database_error().and_then(|cause| cause.code()) {
            Some(code) if code == STATEMENT_TIMEOUT => Ok(transaction.rollback().await?),
            _ => Err(error.into()),
        },
    }
}

fn audited(row: &QuotaRow) -> [(&'static str, Value); 2] {
    [
        ("emits_per_minute", json!(row.emits_per_minute)),
        ("stored_bytes", json!(row.stored_bytes)),
    ]
}
