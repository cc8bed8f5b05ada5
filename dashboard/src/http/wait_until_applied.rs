//! Waits until a change of settings is in effect, which a delete, a pause or a rotation promises.
//! Dispatchers publish the settings snapshot they have applied; one whose lease has expired sends nothing.
//!
//! Invariant: an owner counts as gone only if its lease has expired by the database's clock and this process has seen
//! it unrenewed for a whole lease. A database clock that jumps, as after a failover, ends no lease: the owner uses
//! its own clock and keeps sending.

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_dispatcher::{LEASE, bind::BindAll};
use postrider_proto::Shard;
use sqlx::{FromRow, PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::{
    App, Pool,
    http::problem::{Kind, Problem},
};

const POLL: Duration = Duration::from_millis(10);
/// Slightly longer than a lease: by then the owner has applied the change or is no longer the owner.
const WAIT_MAX: Duration = Duration::from_secs(6);
/// Dispatchers whose renewals are tracked; beyond this the map is cleared and rebuilt.
const OWNERS_MAX: usize = 1_024;

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

/// A dispatcher that owns one of the shards and has not applied the change.
#[derive(Debug, FromRow)]
struct OwnerRow {
    id: Uuid,
    expires_at: DateTime<Utc>,
    expired: bool,
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
    let now = Instant::now();
    // All are checked, even after one that is alive: the silence of each is measured from its first check.
    let alive = behind.iter().filter(|row| !owners.is_gone(row, now)).count();
    Ok(alive == 0)
}

static OWNERS: LazyLock<Mutex<Owners>> = LazyLock::new(Mutex::default);

/// When each owner's expiry was last seen to change. Kept across requests, so that only the first one after a
/// dispatcher died waits for a whole lease.
#[derive(Debug, Default)]
struct Owners(HashMap<Uuid, (DateTime<Utc>, Instant)>);

impl Owners {
    fn is_gone(&mut self, row: &OwnerRow, now: Instant) -> bool {
        if self.0.len() >= OWNERS_MAX && !self.0.contains_key(&row.id) {
            self.0.clear();
        }
        let seen = self.0.entry(row.id).or_insert((row.expires_at, now));
        if seen.0 != row.expires_at {
            *seen = (row.expires_at, now);
        }
        row.expired && now.duration_since(seen.1) >= LEASE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(expires_unix: i64, expired: bool) -> OwnerRow {
        OwnerRow {
            id: Uuid::from_u128(1),
            expires_at: DateTime::from_timestamp(expires_unix, 0).expect("in range"),
            expired,
        }
    }

    #[test]
    fn an_owner_is_gone_only_by_both_clocks() {
        let (mut owners, start) = (Owners::default(), Instant::now());
        assert!(!owners.is_gone(&row(1, true), start), "seen for the first time");
        assert!(!owners.is_gone(&row(1, true), start + LEASE / 2));
        assert!(
            !owners.is_gone(&row(2, true), start + LEASE),
            "it renewed, whatever the database's clock says"
        );
        assert!(
            !owners.is_gone(&row(2, false), start + 3 * LEASE),
            "silent here, but not over by the database's clock"
        );
        assert!(owners.is_gone(&row(2, true), start + 3 * LEASE));
    }

    #[test]
    fn what_is_remembered_has_a_bound() {
        let (mut owners, now) = (Owners::default(), Instant::now());
        for id in 0..3 * OWNERS_MAX as u128 {
            let id = Uuid::from_u128(id);
            owners.is_gone(&OwnerRow { id, ..row(1, true) }, now);
            assert!(owners.0.len() <= OWNERS_MAX);
        }
    }
}
