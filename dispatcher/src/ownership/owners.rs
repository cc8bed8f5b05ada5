//! Whether the owner of a shard still sends, for those who wait until it has confirmed something.
//!
//! Invariant: an owner counts as gone only if its lease has expired by the database's clock and this process has seen
//! it unrenewed for a whole lease. A database clock that jumps, as after a failover, ends no lease: the owner uses
//! its own clock and keeps sending.

use std::{collections::HashMap, time::Instant};

use chrono::{DateTime, Utc};
use sqlx::FromRow;
use uuid::Uuid;

use super::decision::LEASE;

/// Dispatchers whose renewals are tracked; beyond this the map is cleared and rebuilt.
const OWNERS_MAX: usize = 1_024;

/// A dispatcher that owns a shard and has not confirmed yet.
#[derive(Debug, FromRow)]
pub struct OwnerRow {
    pub id: Uuid,
    pub expires_at: DateTime<Utc>,
    pub expired: bool,
}

/// When each owner's expiry was last seen to change.
#[derive(Debug, Default)]
pub struct Owners(HashMap<Uuid, (DateTime<Utc>, Instant)>);

impl Owners {
    /// How many of them may still send. All are looked at, even after one that is alive: the silence of each is measured
    /// from its first look.
    pub fn count_alive(&mut self, behind: &[OwnerRow], now: Instant) -> usize {
        behind.iter().filter(|row| !self.is_gone(row, now)).count()
    }

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
