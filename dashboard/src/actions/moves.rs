//! Moves of tenants between cells: begin and cancel them. A dispatcher at home carries them out.

use postrider_dispatcher::moves::{self, Refusal};
use postrider_proto::api::{Move, NewMove};
use serde_json::json;

use crate::{
    App,
    auth::Actor,
    http::problem::{Problem, excerpt},
    tables::{
        self,
        audit::{self, Action, Entry},
        is_public_id,
    },
};

pub(crate) fn view(row: moves::Move) -> Move {
    Move {
        id: row.public_id,
        tenant: row.tenant,
        from: row.source_name,
        to: row.target_name,
        state: row.state.name().to_owned(),
        waits_for: row.waits_for,
        copied: row.copied,
        created_by: row.asked_by,
        created_at: row.created_at,
        cancelled_by: row.cancelled_by,
        switched_at: row.switched_at,
        ended_at: row.ended_at,
    }
}

async fn find_row(app: &App, id: &str) -> Result<moves::Move, Problem> {
    let found = match is_public_id("mov", id) {
        true => moves::find(&app.pool, id).await?,
        false => None,
    };
    found.ok_or_else(|| Problem::not_found("move"))
}

pub(crate) async fn find(app: &App, id: &str) -> Result<Move, Problem> {
    Ok(view(find_row(app, id).await?))
}

pub(crate) async fn begin(app: &App, actor: &Actor, form: &NewMove) -> Result<Move, Problem> {
    let unknown = || {
        Problem::invalid(
            "/tenant",
            format!("there is no tenant `{}`", excerpt(&form.tenant)),
        )
    };
    let tenant = tables::tenants::find(&app.pool, &form.tenant)
        .await?
        .ok_or_else(unknown)?;
    let mut transaction = tables::begin(&app.pool).await?;
    let begun = moves::begin(&mut transaction, tenant.id, &form.to, &actor.name).await?;
    let id = begun.map_err(|refusal| refused(refusal, form))?;
    let entry = Entry::new(actor, Action::TenantMoveBegun, Some(tenant.id), &form.tenant)
        .with(json!({"move": id, "to": form.to}));
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    app.wake.now();
    find(app, &id).await
}

fn refused(refusal: Refusal, form: &NewMove) -> Problem {
    let tenant = &form.tenant;
    match refusal {
        Refusal::NoCell => Problem::invalid("/to", format!("there is no cell `{}`", excerpt(&form.to))),
        Refusal::SameCell => {
            Problem::conflict(format!("Tenant `{tenant}` lives in cell `{}` already.", form.to))
        }
        Refusal::Draining => Problem::conflict(format!(
            "Cell `{}` is being drained. Choose another one.",
            form.to
        )),
        Refusal::Moving => Problem::conflict(format!(
            "Tenant `{tenant}` is moving already. `GET /v1/moves` shows where it is."
        )),
        Refusal::Deleted => Problem::not_found("tenant"),
    }
}

pub(crate) async fn cancel(app: &App, actor: &Actor, id: &str) -> Result<Move, Problem> {
    let row = find_row(app, id).await?;
    let mut transaction = tables::begin(&app.pool).await?;
    if !moves::cancel(&mut *transaction, row.id, &actor.name).await? {
        return Err(Problem::conflict(
            "It is too late: the new cell has taken over, or the move has ended. Move the tenant back instead.",
        ));
    }
    let entry = Entry::new(
        actor,
        Action::TenantMoveCancelled,
        Some(row.tenant_id),
        &row.tenant,
    )
    .with(json!({"move": row.public_id}));
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    find(app, id).await
}
