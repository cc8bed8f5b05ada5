//! Who owns which shard. One row per dispatcher, renewed every second and valid for five by the database's clock; a
//! shard's row changes only when it is taken or released, and each change counts its epoch up.
//!
//! Invariant: a shard is taken only from an owner that is expired by the database's clock *and* was seen unrenewed for
//! a whole lease by this process's own clock. So a clock that steps can't make two owners.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{Epoch, Shard, limits::SHARDS};
use sqlx::{FromRow, PgPool};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{engine::Event, lease::Lease};

const LEASE: Duration = Duration::from_secs(5);
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// The lease is over here this much before the database says so.
const MARGIN: Duration = Duration::from_millis(500);

pub(crate) struct Shards {
    pub(crate) pool: PgPool,
    pub(crate) id: Uuid,
    pub(crate) name: String,
    pub(crate) lease: Lease,
    pub(crate) events: mpsc::UnboundedSender<Event>,
    /// Shards whose lanes are empty, to be released.
    pub(crate) drained: mpsc::UnboundedReceiver<Shard>,
}

/// The table of shards as this process last saw it, and what it has seen of the others.
#[derive(Default)]
struct View {
    held: HashMap<Shard, Epoch>,
    draining: HashSet<Shard>,
    /// This process is stopping: it takes nothing more.
    leaving: bool,
    /// When each other dispatcher's expiry was last seen to change.
    renewed: HashMap<Uuid, (DateTime<Utc>, Instant)>,
}

#[derive(Debug, FromRow)]
struct DispatcherRow {
    id: Uuid,
    expires_at: DateTime<Utc>,
    expired: bool,
    leaving: bool,
}

#[derive(Debug, FromRow)]
struct ShardRow {
    shard: Shard,
    owner: Option<Uuid>,
    epoch: Epoch,
}

impl Shards {
    /// Renews and balances. When the process is stopping, gives each shard back as soon as nothing of it is on the wire, so
    /// that one endpoint that hangs does not hold up the others; when told to leave, whatever is left.
    pub(crate) async fn run(mut self, stopping: CancellationToken, leave: CancellationToken) {
        let mut view = View::default();
        let mut drained = Vec::new();
        let mut tick = tokio::time::interval(RENEW_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let until = self.lease.until();
            tokio::select! {
                _ = tick.tick() => self.renew(&mut view).await,
                () = tokio::time::sleep_until(until.into()), if self.lease.is_valid() => {}
                n = self.drained.recv_many(&mut drained, SHARDS as usize) => {
                    if n == 0 { break }
                    self.release_drained(&mut view, &drained).await;
                    drained.clear();
                }
                () = stopping.cancelled(), if !view.leaving => {
                    view.leaving = true;
                    self.renew(&mut view).await;
                }
                () = leave.cancelled() => break,
            }
            if self.lease.expire(Instant::now()) {
                tracing::warn!("the lease ran out: nothing is sent until it is renewed");
                let _ = self.events.send(Event::Suspended);
            }
        }
        if let Err(error) = self.leave().await {
            tracing::warn!(%error, "the shards could not be released; they expire by themselves");
        }
    }

    async fn renew(&self, view: &mut View) {
        let asked_at = Instant::now();
        // A renewal that hangs is no renewal: the next tick tries another connection.
        let renewed = tokio::time::timeout(RENEW_EVERY * 2, self.renew_and_look(view.leaving)).await;
        let (dispatchers, shards) = match renewed {
            Ok(Ok(tables)) => tables,
            Ok(Err(error)) => return tracing::warn!(%error, "the lease could not be renewed"),
            Err(_) => return tracing::warn!("the lease could not be renewed: the database does not answer"),
        };
        let term = self.lease.extend(asked_at + LEASE - MARGIN);
        view.note_owners(&dispatchers, Instant::now());
        let mine: HashMap<Shard, Epoch> = shards
            .iter()
            .filter(|row| row.owner == Some(self.id))
            .map(|row| (row.shard, row.epoch))
            .collect();
        let lost: Vec<Shard> = view
            .held
            .iter()
            .filter(|(shard, epoch)| mine.get(shard) != Some(epoch))
            .map(|(s, _)| *s)
            .collect();
        if !lost.is_empty() {
            view.held.retain(|shard, _| !lost.contains(shard));
            view.draining.retain(|shard| !lost.contains(shard));
            let _ = self.events.send(Event::Lost(lost));
        }
        let found: Vec<(Shard, Epoch)> = mine
            .into_iter()
            .filter(|(shard, _)| !view.held.contains_key(shard))
            .collect();
        self.gain(view, found);
        // After what was lost: under the new term nothing of that may be sent.
        if let Some(term) = term {
            let _ = self.events.send(Event::Resumed(term));
        }
        self.balance(view, &dispatchers, &shards).await;
    }

    fn gain(&self, view: &mut View, shards: Vec<(Shard, Epoch)>) {
        if !shards.is_empty() {
            view.held.extend(shards.iter().copied());
            let _ = self.events.send(Event::Gained(shards));
        }
    }

    /// Takes what is free up to this dispatcher's share, or begins to give back what is above it.
    async fn balance(&self, view: &mut View, dispatchers: &[DispatcherRow], shards: &[ShardRow]) {
        let now = Instant::now();
        let live = dispatchers.iter().filter(|d| !d.expired && !d.leaving);
        let mut live: Vec<Uuid> = live.map(|d| d.id).collect();
        live.sort_unstable();
        let share = if view.leaving {
            0
        } else {
            fair_share(&live, self.id)
        };
        if view.held.len() < share {
            let mut free: Vec<(Shard, Epoch)> = shards
                .iter()
                .filter(|row| {
                    row.owner != Some(self.id) && row.owner.is_none_or(|owner| view.is_dead(owner, now))
                })
                .map(|row| (row.shard, row.epoch))
                .collect();
            // Dispatchers that start together begin at different places.
            let rank = live.iter().position(|id| *id == self.id).unwrap_or(0);
            let turn = rank * usize::from(SHARDS as u16) / live.len().max(1);
            free.sort_unstable_by_key(|(shard, _)| {
                (shard.0 as usize + SHARDS as usize - turn) % SHARDS as usize
            });
            free.truncate(share - view.held.len());
            if !free.is_empty() {
                match take(&self.pool, self.id, &free).await {
                    Ok(taken) => {
                        tracing::info!(shards = taken.len(), "took shards");
                        self.gain(view, taken);
                    }
                    Err(error) => tracing::warn!(%error, "free shards could not be taken"),
                }
            }
        }
        let kept = view.held.len() - view.draining.len();
        if kept > share {
            let mut surplus: Vec<Shard> = view
                .held
                .keys()
                .copied()
                .filter(|shard| !view.draining.contains(shard))
                .collect();
            surplus.sort_unstable();
            let surplus = surplus.split_off(share);
            view.draining.extend(surplus.iter().copied());
            let _ = self.events.send(Event::Drain(surplus));
        }
    }

    async fn release_drained(&self, view: &mut View, drained: &[Shard]) {
        let drained: Vec<Shard> = drained
            .iter()
            .copied()
            .filter(|s| view.draining.contains(s))
            .collect();
        if drained.is_empty() {
            return;
        }
        match release(&self.pool, self.id, &drained).await {
            Ok(()) => {
                view.draining.retain(|shard| !drained.contains(shard));
                view.held.retain(|shard, _| !drained.contains(shard));
                let _ = self.events.send(Event::Lost(drained));
            }
            Err(error) => {
                tracing::warn!(%error, "shards could not be released");
                let _ = self.events.send(Event::Drain(drained));
            }
        }
    }

    async fn renew_and_look(
        &self,
        leaving: bool,
    ) -> Result<(Vec<DispatcherRow>, Vec<ShardRow>), sqlx::Error> {
        sqlx::query(
            "insert into postrider.dispatchers (id, name, expires_at, leaving)
             values ($1, $2, clock_timestamp() + $3 * interval '1 millisecond', $4)
             on conflict (id) do update set expires_at = excluded.expires_at, leaving = excluded.leaving",
        )
        .bind(self.id)
        .bind(&self.name)
        .bind(LEASE.as_millis() as i64)
        .bind(leaving)
        .execute(&self.pool)
        .await?;
        let dispatchers = sqlx::query_as(
            "select id, expires_at, expires_at <= clock_timestamp() as expired, leaving from postrider.dispatchers",
        )
        .fetch_all(&self.pool)
        .await?;
        let shards = sqlx::query_as("select shard, owner, epoch from postrider.shards")
            .fetch_all(&self.pool)
            .await?;
        Ok((dispatchers, shards))
    }

    async fn leave(&self) -> Result<(), sqlx::Error> {
        sqlx::query("update postrider.shards set owner = null, epoch = epoch + 1 where owner = $1")
            .bind(self.id)
            .execute(&self.pool)
            .await?;
        // Rows of dispatchers that died long ago go with it.
        sqlx::query(
            "delete from postrider.dispatchers where id = $1 or expires_at < clock_timestamp() - interval '1 hour'",
        )
        .bind(self.id)
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}

impl View {
    fn note_owners(&mut self, dispatchers: &[DispatcherRow], now: Instant) {
        self.renewed
            .retain(|id, _| dispatchers.iter().any(|d| d.id == *id));
        for row in dispatchers {
            let seen = self.renewed.entry(row.id).or_insert((row.expires_at, now));
            if seen.0 != row.expires_at {
                *seen = (row.expires_at, now);
            }
        }
    }

    /// The statement that takes a shard checks the database's clock; this is the check by our own.
    /// A row that is gone was deleted by its owner as it left, or long after it died.
    fn is_dead(&self, owner: Uuid, now: Instant) -> bool {
        self.renewed
            .get(&owner)
            .is_none_or(|(_, since)| now.duration_since(*since) >= LEASE)
    }
}

/// The shares of all live dispatchers add up to all shards.
fn fair_share(live: &[Uuid], me: Uuid) -> usize {
    let (all, count) = (SHARDS as usize, live.len().max(1));
    let rank = live.iter().position(|id| *id == me).unwrap_or(0);
    all / count + usize::from(rank < all % count)
}

/// Waits for the old owner's last records, which hold the rows `for share`.
async fn take(pool: &PgPool, me: Uuid, free: &[(Shard, Epoch)]) -> Result<Vec<(Shard, Epoch)>, sqlx::Error> {
    let (shards, epochs): (Vec<Shard>, Vec<Epoch>) = free.iter().copied().unzip();
    sqlx::query_as(
        "with free as (
             select s.shard from postrider.shards s
             where (s.shard, s.epoch) in (select * from unnest($2::smallint[], $3::bigint[]))
               and not exists (select from postrider.dispatchers d
                               where d.id = s.owner and d.expires_at > clock_timestamp())
             order by s.shard for update
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_to_all_shards() {
        for count in 1..=70 {
            let live: Vec<Uuid> = (0..count).map(Uuid::from_u128).collect();
            let shares: Vec<usize> = live.iter().map(|id| fair_share(&live, *id)).collect();
            assert_eq!(shares.iter().sum::<usize>(), SHARDS as usize);
            assert!(
                shares
                    .iter()
                    .max()
                    .zip(shares.iter().min())
                    .is_some_and(|(most, least)| most - least <= 1)
            );
        }
    }

    #[test]
    fn an_owner_is_dead_only_after_a_lease_of_silence_seen_here() {
        let (start, owner) = (Instant::now(), Uuid::from_u128(1));
        let row = |seconds| DispatcherRow {
            id: owner,
            expires_at: DateTime::from_timestamp(seconds, 0).expect("in range"),
            expired: true,
            leaving: false,
        };
        let mut view = View::default();
        view.note_owners(&[row(1)], start);
        assert!(
            !view.is_dead(owner, start + Duration::from_secs(4)),
            "seen only for four seconds"
        );
        view.note_owners(&[row(2)], start + Duration::from_secs(4));
        assert!(
            !view.is_dead(owner, start + Duration::from_secs(6)),
            "it renewed meanwhile"
        );
        view.note_owners(&[row(2)], start + Duration::from_secs(9));
        assert!(view.is_dead(owner, start + Duration::from_secs(9)));
        view.note_owners(&[], start);
        assert!(view.is_dead(owner, start), "its row is gone");
    }
}
