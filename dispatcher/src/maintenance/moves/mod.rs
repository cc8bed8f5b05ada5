//! Moves of tenants between cells, as durable jobs: requested here, carried out by a dispatcher at home (`run.rs`).
//!
//! A tenant that moves accepts no events anywhere: they wait in the outbox at home. Once nothing can be added at its cell
//! and nothing of it is in flight, its rows are copied (`parts.rs`); then one statement at home changes the directory, and the
//! rows at the old place are erased. Until that statement a move can be cancelled.
//!
//! Invariant: all writes to a cell go through one connection that holds the tenant's lock there. Another process
//! continues only when that connection is gone, and with it everything that its owner could still write.

mod parts;
mod place;
mod run;
mod task;

use chrono::{DateTime, Utc};
use data_encoding::BASE32HEX_NOPAD;
use postrider_proto::TenantId;
use sqlx::{FromRow, PgConnection, PgExecutor, Type};

use crate::bind::BindAll;

pub(crate) use run::Mover;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Type)]
#[sqlx(type_name = "move_state", rename_all = "lowercase")]
pub enum MoveState {
    Stopping,
    Copying,
    Switching,
    Erasing,
    Cancelling,
    Done,
    Cancelled,
}

impl MoveState {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stopping => "stopping",
            Self::Copying => "copying",
            Self::Switching => "switching",
            Self::Erasing => "erasing",
            Self::Cancelling => "cancelling",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
        }
    }
}

#[derive(Debug, Clone, FromRow)]
pub struct Move {
    pub id: i64,
    pub public_id: String,
    pub tenant_id: TenantId,
    pub tenant: String,
    pub source_name: String,
    pub target_name: String,
    pub state: MoveState,
    pub waits_for: Option<String>,
    pub copied: i64,
    pub asked_by: String,
    pub created_at: DateTime<Utc>,
    pub cancelled_by: Option<String>,
    pub switched_at: Option<DateTime<Utc>>,
    pub ended_at: Option<DateTime<Utc>>,
}

/// What is copied. Everything else that belongs to a tenant is at home, or each database's own.
pub fn copied_tables() -> impl Iterator<Item = &'static str> {
    parts::PARTS.iter().map(|part| part.table)
}

/// Why a move can't begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("there is no cell of this name")]
    NoCell,
    #[error("the tenant already lives in this cell")]
    SameCell,
    #[error("this cell is being drained and takes no tenants")]
    Draining,
    #[error("the tenant is moving already")]
    Moving,
    #[error("the tenant was deleted")]
    Deleted,
}

macro_rules! select_move {
    ($rest:literal) => {
        concat!(
            "select m.id, m.public_id, m.tenant_id, t.slug as tenant, s.name as source_name, g.name as target_name, m.state,
                    m.waits_for, m.copied, m.asked_by, m.created_at, m.cancelled_by, m.switched_at, m.ended_at
             from postrider.tenant_moves m
             join postrider.tenants t on t.id = m.tenant_id
             join postrider.cells s on s.id = m.source
             join postrider.cells g on g.id = m.target ",
            $rest
        )
    };
}

/// Hard to guess, as all ids in the API are.
fn new_public_id() -> String {
    let bytes: [u8; 15] = rand::random();
    format!("mov_{}", BASE32HEX_NOPAD.encode(&bytes).to_ascii_lowercase())
}

/// In the transaction of the request, at home; returns the move's public id. The tenant stops where it is once its cell has learned of it.
pub async fn begin(
    home: &mut PgConnection,
    tenant: TenantId,
    target: &str,
    asked_by: &str,
) -> Result<Result<String, Refusal>, sqlx::Error> {
    let target: Option<(i16, String)> =
        sqlx::query_as("select id, state from postrider.cells where name = $1")
            .bind(target)
            .fetch_optional(&mut *home)
            .await?;
    let Some((target, target_state)) = target else {
        return Ok(Err(Refusal::NoCell));
    };
    // A tenant that has arrived is still being erased where it was.
    let tenant_now: Option<(i16, bool)> = sqlx::query_as(
        "select t.cell_id,
                t.moving or exists (select from postrider.tenant_moves m where m.tenant_id = t.id and m.ended_at is null)
         from postrider.tenants t where t.id = $1 and t.deleted_at is null for update of t",
    )
    .bind(tenant)
    .fetch_optional(&mut *home)
    .await?;
    let refusal = match tenant_now {
        None => Some(Refusal::Deleted),
        Some((_, true)) => Some(Refusal::Moving),
        Some((source, _)) if source == target => Some(Refusal::SameCell),
        Some(_) if target_state == "draining" => Some(Refusal::Draining),
        Some(_) => None,
    };
    if let Some(refusal) = refusal {
        return Ok(Err(refusal));
    }
    let public_id = new_public_id();
    sqlx::query(
        "with moving as (update postrider.tenants set moving = true where id = $1 returning id, cell_id)
         insert into postrider.tenant_moves (public_id, tenant_id, source, target, asked_by)
         select $2, id, cell_id, $3, $4 from moving",
    )
    .bind_all((tenant, &public_id, target, asked_by))
    .execute(home)
    .await?;
    Ok(Ok(public_id))
}

/// The tenant goes on at once where it is, even if the cell that it was going to does not respond: what was copied there is erased
/// later. Returns false if the tenant has switched already, or the move has ended.
pub async fn cancel(home: impl PgExecutor<'_>, id: i64, by: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "with cancelled as (
             update postrider.tenant_moves set state = 'cancelling', cancelled_by = $2, waits_for = null
             where id = $1 and state in ('stopping', 'copying')
             returning tenant_id, source
         ),
         -- At home those events come first that waited.
         going_on as (
             update postrider.tenants t set moving = false from cancelled c where t.id = c.tenant_id and c.source <> 0
         )
         select exists (select from cancelled)",
    )
    .bind_all((id, by))
    .fetch_one(home)
    .await
}

pub async fn find(home: impl PgExecutor<'_>, public_id: &str) -> Result<Option<Move>, sqlx::Error> {
    sqlx::query_as(select_move!("where m.public_id = $1"))
        .bind(public_id)
        .fetch_optional(home)
        .await
}

/// Newest first, of one tenant or of all.
pub async fn list(
    home: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    before: i64,
    limit: i64,
) -> Result<Vec<Move>, sqlx::Error> {
    sqlx::query_as(select_move!(
        "where ($1::int is null or m.tenant_id = $1) and m.id < $2 order by m.id desc limit $3"
    ))
    .bind_all((tenant, before, limit))
    .fetch_all(home)
    .await
}
