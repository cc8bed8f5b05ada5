//! Waits until a change of settings is in effect, which a delete, a pause or a rotation promises.
//! Dispatchers publish the settings snapshot they have applied; one whose lease has expired sends nothing.

use std::{
    sync::{LazyLock, Mutex},
    time::{Duration, Instant},
};

use postrider_dispatcher::{
    bind::BindAll,
    owners::{OwnerRow, Owners},
};
use postrider_proto::Shard;
use sqlx::{PgConnection, Postgres, Transaction};

use crate::{
    App, Pool,
    http::problem::{Kind, Problem},
};

const POLL: Duration = Duration::from_millis(10);
/// Slightly longer than a lease: by then the owner has applied the change or is no longer the owner.
const WAIT_MAX: Duration = Duration::from_secs(6);

/// The transaction of a change.
#[derive(Debug, Clone)]
pub(crate) struct Xid(String);

impl Xid {
    pub(crate) fn read(text: String) -> Self {
        Self(text)
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

pub(crate) async fn current(connection: &mut PgConnection) -> sqlx::Result<Xid> {
    sqlx::query_scalar("select pg_current_xact_id()::text")
        .fetch_one(connection)
        .await
        .map(Xid)
}

/// Commits a change and returns once the shard's owner has applied it.
pub(crate) async fn commit(
    app: &App,
    mut transaction: Transaction<'static, Postgres>,
    shard: Shard,
) -> Result<(), Problem> {
    let xid = current(&mut transaction).await?;
    transaction.commit().await?;
    app.wake.now();
    settled(&app.pool, shard, &xid).await
}

/// Returns once the shard's owner has applied the transaction. The change is committed, so an owner that does not
/// confirm in time is reported as `change-pending`.
pub(crate) async fn settled(pool: &Pool, shard: Shard, xid: &Xid) -> Result<(), Problem> {
    match all_settled(pool, &[shard], xid).await? {
        true => Ok(()),
        false => Err(Problem::new(
            Kind::ChangePending,
            "The change is stored, but the dispatcher that sends to this endpoint has not confirmed it yet. \
             Check the current state before you repeat the request.",
        )),
    }
}

/// Commits a change that concerns several shards and returns once all their owners have applied it.
pub(crate) async fn commit_for_all(
    app: &App,
    mut transaction: Transaction<'static, Postgres>,
    shards: &[Shard],
) -> Result<(), Problem> {
    let xid = current(&mut transaction).await?;
    transaction.commit().await?;
    app.wake.now();
    match all_settled(&app.pool, shards, &xid).await? {
        true => Ok(()),
        false => Err(Problem::new(
            Kind::ChangePending,
            "The change is stored, but not every dispatcher has confirmed it yet. Check the current state before you repeat \
             the request.",
        )),
    }
}

/// The same for several shards. Returns whether all owners applied it in time.
pub(crate) async fn all_settled(pool: &Pool, shards: &[Shard], xid: &Xid) -> sqlx::Result<bool> {
    let wait = async {
        while !is_applied(pool, shards, xid).await? {
            tokio::time::sleep(POLL).await;
        }
        Ok(true)
    };
    tokio::time::timeout(WAIT_MAX, wait).await.unwrap_or(Ok(false))
}

/// An owner publishes with the first shards it acquires: one that has published nothing yet is waited for. A
/// transaction id that this server has not reached yet is from another cluster, before a restore.
async fn is_applied(pool: &Pool, shards: &[Shard], xid: &Xid) -> sqlx::Result<bool> {
    let behind: Vec<OwnerRow> = sqlx::query_as(
        "select distinct d.id, d.expires_at, d.expires_at <= clock_timestamp() as expired
         from postrider.shards s join postrider.dispatchers d on d.id = s.owner
         where s.shard = any($1) and $2::xid8 < pg_snapshot_xmax(pg_current_snapshot())
           and not coalesce(pg_visible_in_snapshot($2::xid8, d.applied), false)",
    )
    .bind_all((shards, &xid.0))
    .fetch_all(pool)
    .await?;
    let mut owners = OWNERS.lock().unwrap_or_else(|e| e.into_inner());
    Ok(owners.count_alive(&behind, Instant::now()) == 0)
}

/// Kept across requests, so that only the first one after a dispatcher died waits for a whole lease.
static OWNERS: LazyLock<Mutex<Owners>> = LazyLock::new(Mutex::default);
