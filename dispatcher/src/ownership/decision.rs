//! Which shards this dispatcher should own: what it holds, what the tables say, and what to change. Pure: rows and
//! time are passed in, so that it can be simulated. `shards.rs` queries the database and carries the decisions out.
//!
//! Invariant: a shard is taken only from an owner that this process has seen unrenewed for a whole lease by its own
//! clock. The statement that takes it checks the database's clock. So a clock that steps can't create two owners.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{Epoch, Shard, limits::SHARDS};
use sqlx::FromRow;
use uuid::Uuid;

/// How long a dispatcher owns its shards after a renewal.
pub const LEASE: Duration = Duration::from_secs(5);
pub(crate) const RENEW_EVERY: Duration = Duration::from_secs(1);
/// The lease ends locally this much before it ends in the database.
pub(crate) const MARGIN: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, FromRow)]
pub(crate) struct DispatcherRow {
    pub(crate) id: Uuid,
    pub(crate) expires_at: DateTime<Utc>,
    pub(crate) expired: bool,
    pub(crate) leaving: bool,
}

#[derive(Debug, Clone, FromRow)]
pub(crate) struct ShardRow {
    pub(crate) shard: Shard,
    pub(crate) owner: Option<Uuid>,
    pub(crate) epoch: Epoch,
}

/// The table of shards as this process last saw it, and its observations of other dispatchers.
#[derive(Debug, Default)]
pub(crate) struct View {
    me: Uuid,
    owned: HashMap<Shard, Epoch>,
    draining: HashSet<Shard>,
    /// This process is stopping: it takes nothing more.
    leaving: bool,
    /// When each other dispatcher's expiry was last seen to change.
    renewed: HashMap<Uuid, (DateTime<Utc>, Instant)>,
}

/// Differences since the previous update.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) lost: Vec<Shard>,
    /// Ours, although the reply to the takeover was lost.
    pub(crate) found: Vec<(Shard, Epoch)>,
}

impl View {
    pub(crate) fn new(me: Uuid) -> Self {
        Self {
            me,
            ..Self::default()
        }
    }

    pub(crate) fn leave(&mut self) {
        self.leaving = true;
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// Applies the rows read from the tables. `now` is not before they were read.
    pub(crate) fn update(
        &mut self,
        dispatchers: &[DispatcherRow],
        shards: &[ShardRow],
        now: Instant,
    ) -> Changes {
        self.note_owners(dispatchers, now);
        let mine: HashMap<Shard, Epoch> = shards
            .iter()
            .filter(|row| row.owner == Some(self.me))
            .map(|row| (row.shard, row.epoch))
            .collect();
        let lost = self
            .owned
            .iter()
            .filter(|(shard, epoch)| mine.get(shard) != Some(epoch));
        let lost: Vec<Shard> = lost.map(|(shard, _)| *shard).collect();
        self.forget(&lost);
        let found: Vec<(Shard, Epoch)> = mine
            .into_iter()
            .filter(|(shard, _)| !self.owned.contains_key(shard))
            .collect();
        self.gained(&found);
        Changes { lost, found }
    }

    pub(crate) fn gained(&mut self, shards: &[(Shard, Epoch)]) {
        self.owned.extend(shards.iter().copied());
    }

    fn forget(&mut self, shards: &[Shard]) {
        self.owned.retain(|shard, _| !shards.contains(shard));
        self.draining.retain(|shard| !shards.contains(shard));
    }

    /// Of these, the ones still to be released.
    pub(crate) fn to_release(&self, drained: &[Shard]) -> Vec<Shard> {
        let draining = |shard: &Shard| self.draining.contains(shard);
        drained.iter().copied().filter(draining).collect()
    }

    pub(crate) fn released(&mut self, shards: &[Shard]) {
        self.forget(shards);
    }

    fn live(dispatchers: &[DispatcherRow]) -> Vec<Uuid> {
        let live = dispatchers.iter().filter(|d| !d.expired && !d.leaving);
        let mut live: Vec<Uuid> = live.map(|d| d.id).collect();
        live.sort_unstable();
        live
    }

    fn share(&self, live: &[Uuid]) -> usize {
        if self.leaving {
            0
        } else {
            fair_share(live, self.me)
        }
    }

    /// Free shards to take, up to this dispatcher's share.
    pub(crate) fn wanted(
        &self,
        dispatchers: &[DispatcherRow],
        shards: &[ShardRow],
        now: Instant,
    ) -> Vec<(Shard, Epoch)> {
        let live = Self::live(dispatchers);
        let missing = self.share(&live).saturating_sub(self.owned.len());
        if missing == 0 {
            return Vec::new();
        }
        let is_free = |row: &&ShardRow| {
            row.owner != Some(self.me) && row.owner.is_none_or(|owner| self.is_dead(owner, now))
        };
        let free = shards.iter().filter(is_free);
        let mut free: Vec<(Shard, Epoch)> = free.map(|row| (row.shard, row.epoch)).collect();
        // Dispatchers that start together begin at different shards.
        let rank = live.iter().position(|id| *id == self.me).unwrap_or(0);
        let turn = rank * usize::from(SHARDS as u16) / live.len().max(1);
        free.sort_unstable_by_key(|(shard, _)| (shard.0 as usize + SHARDS as usize - turn) % SHARDS as usize);
        free.truncate(missing);
        free
    }

    /// Shards above this dispatcher's share that are not being released yet; marks them as being released.
    pub(crate) fn surplus(&mut self, dispatchers: &[DispatcherRow]) -> Vec<Shard> {
        let share = self.share(&Self::live(dispatchers));
        let kept = self.owned.keys().filter(|shard| !self.draining.contains(shard));
        let mut kept: Vec<Shard> = kept.copied().collect();
        if kept.len() <= share {
            return Vec::new();
        }
        kept.sort_unstable();
        let surplus = kept.split_off(share);
        self.draining.extend(surplus.iter().copied());
        surplus
    }

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

    /// A missing row was deleted by its owner on shutdown, or long after it died.
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
        let mut view = View::new(Uuid::from_u128(2));
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
