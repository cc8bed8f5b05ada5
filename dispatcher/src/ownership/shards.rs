//! Leases and shards in the database. One row per dispatcher, renewed every second and valid for five by the database's
//! clock; a shard's row changes only when it is taken or released, and each change counts its epoch up. What follows from
//! the rows is decided in `ownership.rs`.
//!
//! Invariant: no question to the database, however long it hangs, keeps the lease from ending in time.

use std::time::{Duration, Instant};

use postrider_proto::{Epoch, Shard, limits::SHARDS};
use sqlx::PgPool;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    db_timeout::{WithDbTimeout, within},
    deliver::engine::EngineMessage,
    ownership::{
        decision::{DispatcherRow, LEASE, MARGIN, RENEW_EVERY, ShardRow, View},
        lease::Lease,
    },
    telemetry::metrics::METERS,
};

/// A question to the database that takes longer is given up: the next tick asks on another connection.
const ASK_MAX: Duration = Duration::from_secs(2);

pub(crate) struct Shards {
    pub(crate) pool: PgPool,
    pub(crate) id: Uuid,
    pub(crate) name: String,
    pub(crate) lease: Lease,
    pub(crate) events: mpsc::UnboundedSender<EngineMessage>,
    /// Shards whose lanes are empty, to be released.
    pub(crate) drained: mpsc::UnboundedReceiver<Shard>,
}

impl Shards {
    /// Renews and balances. When the process is stopping, gives each shard back as soon as nothing of it is on the wire, so
    /// that one endpoint that hangs does not hold up the others; when told to leave, whatever is left.
    pub(crate) async fn run(self, stopping: CancellationToken, leave: CancellationToken) {
        // Beside the questions to the database: however long they hang, the lease is over in time.
        let watch = watch(self.lease.clone(), self.events.clone());
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
            tracing::warn!(%error, "the shards could not be released; they expire by themselves");
        }
    }

    async fn renew(&self, view: &mut View) {
        let asked_at = Instant::now();
        let (dispatchers, shards) = match within(ASK_MAX, self.renew_and_look(view.is_leaving())).await {
            Ok(tables) => tables,
            Err(error) => {
                METERS.lease_failed.increment(1);
                return tracing::warn!(%error, "the lease could not be renewed");
            }
        };
        METERS.lease_renewed.increment(1);
        let term = self.lease.extend(asked_at + LEASE - MARGIN);
        let changes = view.look(&dispatchers, &shards, Instant::now());
        if !changes.lost.is_empty() {
            let _ = self.events.send(EngineMessage::Lost(changes.lost));
        }
        if !changes.found.is_empty() {
            let _ = self.events.send(EngineMessage::Gained(changes.found));
        }
        // After what was lost: under the new term nothing of that may be sent.
        if let Some(term) = term {
            let _ = self.events.send(EngineMessage::Resumed(term));
        }
        self.balance(view, &dispatchers, &shards).await;
    }

    /// Takes what is free up to this dispatcher's share, or begins to give back what is above it.
    async fn balance(&self, view: &mut View, dispatchers: &[DispatcherRow], shards: &[ShardRow]) {
        let free = view.wanted(dispatchers, shards, Instant::now());
        if !free.is_empty() {
            match within(ASK_MAX, take(&self.pool, self.id, &free)).await {
                Ok(taken) if taken.is_empty() => {}
                Ok(taken) => {
                    tracing::info!(shards = taken.len(), "took shards");
                    view.gained(&taken);
                    let _ = self.events.send(EngineMessage::Gained(taken));
                }
                Err(error) => tracing::warn!(%error, "free shards could not be taken"),
            }
        }
        let surplus = view.surplus(dispatchers);
        if !surplus.is_empty() {
            let _ = self.events.send(EngineMessage::Drain(surplus));
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
                let _ = self.events.send(EngineMessage::Lost(drained));
            }
            Err(error) => {
                tracing::warn!(%error, "shards could not be released");
                let _ = self.events.send(EngineMessage::Drain(drained));
            }
        }
    }

    async fn renew_and_look(
        &self,
        leaving: bool,
    ) -> Result<(Vec<DispatcherRow>, Vec<ShardRow>), sqlx::Error> {
        // One connection for all three: the pool asks each time it lends one whether it is alive.
        let mut connection = self.pool.acquire().await?;
        sqlx::query(
            "insert into postrider.dispatchers (id, name, expires_at, leaving)
             values ($1, $2, clock_timestamp() + $3 * interval '1 millisecond', $4)
             on conflict (id) do update set expires_at = excluded.expires_at, leaving = excluded.leaving",
        )
        .bind(self.id)
        .bind(&self.name)
        .bind(LEASE.as_millis() as i64)
        .bind(leaving)
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
        // Rows of dispatchers that died long ago go with it, once their shards are others': the row of an owner is what a
        // takeover locks.
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

/// Ends the lease as soon as its time has come.
async fn watch(lease: Lease, events: mpsc::UnboundedSender<EngineMessage>) {
    loop {
        let now = Instant::now();
        if lease.expire(now) {
            METERS.lease_expired.increment(1);
            tracing::warn!("the lease ran out: nothing is sent until it is renewed");
            let _ = events.send(EngineMessage::Suspended);
        }
        // One that is over has no end to wait for, until it is renewed.
        let until = lease.until();
        let next = if until > now { until } else { now + RENEW_EVERY };
        tokio::time::sleep_until(next.into()).await;
    }
}

/// Nothing is recorded under the old owner once this is committed. A shard that its last records hold `for share` is left
/// for the next time: waiting for them, on a connection that may hang, would cost this process its own lease.
///
/// The old owner's row is locked as well. If it is being renewed at this moment, its owner is not dead; if it is renewed
/// after this, the renewal waits for this commit, and its owner reads that it has lost the shard before it goes on.
async fn take(pool: &PgPool, me: Uuid, free: &[(Shard, Epoch)]) -> Result<Vec<(Shard, Epoch)>, sqlx::Error> {
    let (shards, epochs): (Vec<Shard>, Vec<Epoch>) = free.iter().copied().unzip();
    sqlx::query_as(
        "with wanted as materialized (
             select s.shard, s.epoch, s.owner from postrider.shards s
             where (s.shard, s.epoch) in (select * from unnest($2::smallint[], $3::bigint[]))
         ),
         dead as materialized (
             select d.id from postrider.dispatchers d
             where d.id in (select w.owner from wanted w) and d.expires_at <= clock_timestamp()
             order by d.id for update skip locked
         ),
         free as (
             select s.shard from postrider.shards s
             where (s.shard, s.epoch) in (select w.shard, w.epoch from wanted w)
               and (s.owner is null or s.owner in (select d.id from dead d)
                    or not exists (select from postrider.dispatchers d where d.id = s.owner))
             order by s.shard for update skip locked
         )
         update postrider.shards s set owner = $1, epoch = s.epoch + 1
         from free where s.shard = free.shard
         returning s.shard, s.epoch",
    )
    .bind(me)
    .bind(shards)
    .bind(epochs)
    .fetch_all(pool)
    .await
}

async fn release(pool: &PgPool, me: Uuid, shards: &[Shard]) -> Result<(), sqlx::Error> {
    sqlx::query(
        "update postrider.shards set owner = null, epoch = epoch + 1 where owner = $1 and shard = any($2)",
    )
    .bind(me)
    .bind(shards)
    .execute(pool)
    .await?;
    Ok(())
}
