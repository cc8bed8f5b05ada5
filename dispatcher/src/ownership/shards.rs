//! Leases and shards in the database. One row per dispatcher, renewed every second and valid for five by the
//! database's clock; a shard's row changes only when it is taken or released, and each change increments its epoch.
//! `decision.rs` decides what follows from the rows.
//!
//! Invariant: no database query, however long it hangs, keeps the lease from ending in time.

use std::time::{Duration, Instant};

use postrider_proto::{Epoch, Shard, limits::SHARDS};
use sqlx::PgPool;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    bind::BindAll,
    db_timeout::{WithDbTimeout, within},
    dedicated_connection::DedicatedConnection,
    deliver::engine::EngineMessage,
    health::database::{self, warn_unless_outage},
    ownership::{
        decision::{DispatcherRow, LEASE, MARGIN, RENEW_EVERY, ShardRow, View},
        lease::Lease,
    },
    telemetry::metrics::METRICS,
};

/// A query that takes longer is abandoned, and its connection closed.
const ASK_MAX: Duration = Duration::from_secs(2);

pub(crate) struct Shards {
    /// Renews the lease: nothing else may delay it.
    pub(crate) renewals: DedicatedConnection,
    /// Takes and releases shards.
    pub(crate) pool: PgPool,
    pub(crate) id: Uuid,
    pub(crate) name: String,
    pub(crate) lease: Lease,
    /// False until the first renewal.
    pub(crate) had_lease: bool,
    pub(crate) engine: mpsc::UnboundedSender<EngineMessage>,
    /// Shards whose lanes are drained, to be released.
    pub(crate) drained: mpsc::UnboundedReceiver<Shard>,
}

impl Shards {
    /// Renews and balances. While the process is stopping, releases each shard as soon as none of its attempts is in
    /// flight, so that one hanging endpoint does not delay the others; on `leave`, releases the rest.
    pub(crate) async fn run(self, stopping: CancellationToken, leave: CancellationToken) {
        // In parallel with the queries: however long they hang, the lease ends in time.
        let watch = watch(self.lease.clone(), self.engine.clone());
        tokio::select! {
            () = self.keep(stopping, leave) => {}
            () = watch => {}
        }
    }

    async fn keep(mut self, stopping: CancellationToken, leave: CancellationToken) {
        let mut view = View::new(self.id);
        let mut drained = Vec::new();
        let mut tick = tokio::time::interval(RENEW_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => self.renew(&mut view).await,
                n = self.drained.recv_many(&mut drained, SHARDS as usize) => {
                    if n == 0 { break }
                    self.release_drained(&mut view, &drained).await;
                    drained.clear();
                }
                () = stopping.cancelled(), if !view.is_leaving() => {
                    view.leave();
                    self.renew(&mut view).await;
                }
                () = leave.cancelled() => break,
            }
        }
        if let Err(error) = self.leave().with_db_timeout().await {
            warn_unless_outage!(
                error,
                "releasing the shards failed; other dispatchers take them over when the lease expires"
            );
        }
    }

    async fn renew(&mut self, view: &mut View) {
        let asked_at = Instant::now();
        let (dispatchers, shards) = match within(ASK_MAX, self.renew_and_look(view.is_leaving())).await {
            Ok(tables) => tables,
            Err(error) => {
                self.renewals.close();
                METRICS.lease_failed.increment(1);
                warn_unless_outage!(error, "renewing the lease failed; retrying");
                return;
            }
        };
        METRICS.lease_renewed.increment(1);
        let term = self.lease.extend(asked_at + LEASE - MARGIN);
        let changes = view.update(&dispatchers, &shards, Instant::now());
        if !changes.lost.is_empty() {
            let _ = self.engine.send(EngineMessage::Lost(changes.lost));
        }
        if !changes.found.is_empty() {
            let _ = self.engine.send(EngineMessage::Gained(changes.found));
        }
        // After the lost shards: nothing of theirs may be sent under the new term.
        if let Some(term) = term {
            let _ = self.engine.send(EngineMessage::Resumed(term));
            if std::mem::replace(&mut self.had_lease, true) {
                tracing::info!("lease renewed; sending resumes");
            }
        }
        self.balance(view, &dispatchers, &shards).await;
    }

    /// Takes free shards up to this dispatcher's share, or begins to release those above it.
    async fn balance(&self, view: &mut View, dispatchers: &[DispatcherRow], shards: &[ShardRow]) {
        let free = view.wanted(dispatchers, shards, Instant::now());
        if !free.is_empty() {
            match within(ASK_MAX, take(&self.pool, self.id, &free)).await {
                Ok(taken) if taken.is_empty() => {}
                Ok(taken) => {
                    tracing::info!(shards = taken.len(), "took shards");
                    view.gained(&taken);
                    let _ = self.engine.send(EngineMessage::Gained(taken));
                }
                Err(error) => warn_unless_outage!(error, "taking free shards failed; retrying"),
            }
        }
        let surplus = view.surplus(dispatchers);
        if !surplus.is_empty() {
            let _ = self.engine.send(EngineMessage::Drain(surplus));
        }
    }

    async fn release_drained(&self, view: &mut View, drained: &[Shard]) {
        let drained = view.to_release(drained);
        if drained.is_empty() {
            return;
        }
        match within(ASK_MAX, release(&self.pool, self.id, &drained)).await {
            Ok(()) => {
                view.released(&drained);
                let _ = self.engine.send(EngineMessage::Lost(drained));
            }
            Err(error) => {
                warn_unless_outage!(error, "releasing shards failed; retrying");
                let _ = self.engine.send(EngineMessage::Drain(drained));
            }
        }
    }

    async fn renew_and_look(
        &mut self,
        leaving: bool,
    ) -> Result<(Vec<DispatcherRow>, Vec<ShardRow>), sqlx::Error> {
        let connection = self.renewals.open().await?;
        sqlx::query(
            "insert into postrider.dispatchers (id, name, expires_at, leaving)
             values ($1, $2, clock_timestamp() + $3 * interval '1 millisecond', $4)
             on conflict (id) do update set expires_at = excluded.expires_at, leaving = excluded.leaving",
        )
        .bind_all((self.id, &self.name, LEASE.as_millis() as i64, leaving))
        .execute(&mut *connection)
        .await?;
        let dispatchers = sqlx::query_as(
            "select id, expires_at, expires_at <= clock_timestamp() as expired, leaving from postrider.dispatchers",
        )
        .fetch_all(&mut *connection)
        .await?;
        let shards = sqlx::query_as("select shard, owner, epoch from postrider.shards")
            .fetch_all(&mut *connection)
            .await?;
        Ok((dispatchers, shards))
    }

    async fn leave(&self) -> Result<(), sqlx::Error> {
        sqlx::query("update postrider.shards set owner = null, epoch = epoch + 1 where owner = $1")
            .bind(self.id)
            .execute(&self.pool)
            .await?;
        // Also deletes rows of dispatchers that died long ago, once others own their shards: a takeover locks the row
        // of the owner.
        sqlx::query(
            "delete from postrider.dispatchers d
             where d.id = $1 or (d.expires_at < clock_timestamp() - interval '1 hour'
                 and not exists (select from postrider.shards s where s.owner = d.id))",
        )
        .bind(self.id)
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}

/// Ends the lease as soon as it expires.
async fn watch(lease: Lease, engine: mpsc::UnboundedSender<EngineMessage>) {
    loop {
        let now = Instant::now();
        if lease.expire(now) {
            METRICS.lease_expired.increment(1);
            // Otherwise the outage has been logged.
            if database::is_writable() {
                tracing::warn!("lease expired; sending stops until it is renewed");
            }
            let _ = engine.send(EngineMessage::Suspended);
        }
        // An expired lease has no deadline to wait for until it is renewed.
        let until = lease.until();
        let next = if until > now { until } else { now + RENEW_EVERY };
        tokio::time::sleep_until(next.into()).await;
    }
}

/// Nothing is recorded under the old owner once this is committed. A shard that its last records have locked `for
/// share` is skipped until the next time: waiting for them, on a connection that may hang, would cost this process
/// its own lease.
///
/// The old owner's row is locked as well. If it is being renewed at this moment, its owner is alive; if it is renewed
/// later, the renewal waits for this commit, and its owner reads that it has lost the shard before it continues.
async fn take(pool: &PgPool, me: Uuid, free: &[(Shard, Epoch)]) -> Result<Vec<(Shard, Epoch)>, sqlx::Error> {
    let (shards, epochs): (Vec<Shard>, Vec<Epoch>) = free.iter().copied().unzip();
    sqlx::query_as(include_str!("sql/take_shards.sql"))
        .bind_all((me, shards, epochs))
        .fetch_all(pool)
        .await
}

async fn release(pool: &PgPool, me: Uuid, shards: &[Shard]) -> Result<(), sqlx::Error> {
    sqlx::query(
        "update postrider.shards set owner = null, epoch = epoch + 1 where owner = $1 and shard = any($2)",
    )
    .bind_all((me, shards))
    .execute(pool)
    .await?;
    Ok(())
}
