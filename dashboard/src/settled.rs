//! Waiting until a change of settings is in effect: what a delete, a pause or a rotation promises.
//! Dispatchers publish the snapshot of settings they have applied; one whose lease has run out sends nothing.

use std::time::Duration;

use postrider_proto::Shard;
use sqlx::PgConnection;

use crate::{
    Pool,
    problem::{Kind, Problem},
};

const POLL: Duration = Duration::from_millis(10);
/// A little over a lease: by then the owner has applied the change or is no owner any more.
const WAIT_MAX: Duration = Duration::from_secs(6);

/// The transaction a change was made in.
pub(crate) struct Xid(String);

pub(crate) async fn current(connection: &mut PgConnection) -> Result<Xid, sqlx::Error> {
    sqlx::query_scalar("select pg_current_xact_id()::text")
        .fetch_one(connection)
        .await
        .map(Xid)
}

/// Returns when the shard's owner has applied what that transaction changed. It has committed, so that an owner that
/// does not confirm in time is told as what it is, and not passed over.
pub(crate) async fn settled(pool: &Pool, shard: Shard, xid: &Xid) -> Result<(), Problem> {
    match all_settled(pool, &[shard], xid).await? {
        true => Ok(()),
        false => Err(Problem::new(
            Kind::Busy,
            "The change is stored, but the dispatcher that sends to this endpoint has not confirmed it yet: \
             look again before you repeat it.",
        )),
    }
}

/// The same of several shards. Tells whether all owners have applied it in time.
pub(crate) async fn all_settled(pool: &Pool, shards: &[Shard], xid: &Xid) -> Result<bool, sqlx::Error> {
    let wait = async {
        while !is_applied(pool, shards, xid).await? {
            tokio::time::sleep(POLL).await;
        }
        Ok(true)
    };
    tokio::time::timeout(WAIT_MAX, wait).await.unwrap_or(Ok(false))
}

/// An owner publishes with the first shards it takes: one that has published nothing yet is waited for.
async fn is_applied(pool: &Pool, shards: &[Shard], xid: &Xid) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "select not exists (
            select from postrider.shards s join postrider.dispatchers d on d.id = s.owner
            where s.shard = any($1) and d.expires_at > clock_timestamp()
              and not coalesce(pg_visible_in_snapshot($2::xid8, d.applied), false))",
    )
    .bind(shards)
    .bind(&xid.0)
    .fetch_one(pool)
    .await
}
