//! Schedules the steps of replays. Pure: what is due is passed in.
//!
//! Invariants: at most [`AT_ONCE_MAX`] steps at a time, [`TENANT_AT_ONCE_MAX`] of one tenant; the tenant that has waited
//! longest is next, however many replays the others have.

use std::collections::{HashMap, HashSet};

use postrider_proto::{ReplayId, TenantId};

/// Concurrent turns of one process: a quarter of the connections that background work shares.
pub(super) const AT_ONCE_MAX: usize = 4;
pub(super) const TENANT_AT_ONCE_MAX: usize = 2;
/// Turns after which a tenant's last turn is forgotten.
const REMEMBERED: u64 = 10_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) tenant: TenantId,
    pub(super) replay: ReplayId,
}

#[derive(Debug, Default)]
pub(super) struct Turns {
    taken: HashSet<ReplayId>,
    busy: HashMap<TenantId, usize>,
    /// The number of each tenant's latest turn.
    latest: HashMap<TenantId, u64>,
    number: u64,
}

impl Turns {
    pub(super) fn are_all_taken(&self) -> bool {
        self.taken.len() >= AT_ONCE_MAX
    }

    /// Takes the next one out of what is due. Within a tenant the order of the list decides.
    pub(super) fn next(&self, due: &mut Vec<Due>) -> Option<Due> {
        if self.are_all_taken() {
            return None;
        }
        let busy = |one: &Due| self.busy.get(&one.tenant).copied().unwrap_or(0);
        let may = |one: &Due| busy(one) < TENANT_AT_ONCE_MAX && !self.taken.contains(&one.replay);
        let (position, _) = due.iter().enumerate().filter(|(_, one)| may(one)).min_by_key(
            // The first of equals.
            |(_, one)| (busy(one), self.latest.get(&one.tenant).copied().unwrap_or(0)),
        )?;
        Some(due.remove(position))
    }

    pub(super) fn begin(&mut self, one: Due) {
        self.number += 1;
        self.taken.insert(one.replay);
        *self.busy.entry(one.tenant).or_default() += 1;
        self.latest.insert(one.tenant, self.number);
        let forgotten = self.number.saturating_sub(REMEMBERED);
        if self.number.is_multiple_of(REMEMBERED) {
            self.latest.retain(|_, number| *number > forgotten);
        }
    }

    pub(super) fn end(&mut self, one: Due) {
        self.taken.remove(&one.replay);
        if let Some(count) = self.busy.get_mut(&one.tenant) {
            *count -= 1;
            if *count == 0 {
                self.busy.remove(&one.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(tenant: i32, replay: i64) -> Due {
        Due {
            tenant: TenantId(tenant),
            replay: ReplayId(replay),
        }
    }

    /// Begins everything that may begin.
    fn begin_all(turns: &mut Turns, due: &[Due]) -> Vec<Due> {
        let (mut due, mut begun) = (due.to_vec(), Vec::new());
        while let Some(one) = turns.next(&mut due) {
            turns.begin(one);
            begun.push(one);
        }
        begun
    }

    #[test]
    fn one_tenant_never_has_all_turns() {
        let mut turns = Turns::default();
        let bad: Vec<Due> = (0..600).map(|replay| due(1, replay)).collect();
        assert_eq!(begin_all(&mut turns, &bad).len(), TENANT_AT_ONCE_MAX);
        assert_eq!(begin_all(&mut turns, &bad), [], "it has its share");
        let mut all = bad.clone();
        all.push(due(2, 1_000));
        assert_eq!(begin_all(&mut turns, &all), [due(2, 1_000)]);
        let others: Vec<Due> = (3..10)
            .map(|tenant| due(tenant, 2_000 + i64::from(tenant)))
            .collect();
        assert_eq!(
            begin_all(&mut turns, &others),
            [due(3, 2_003)],
            "no more than so many at a time"
        );
        assert!(turns.are_all_taken());
    }

    #[test]
    fn the_tenant_that_waited_longest_is_next_however_many_others_are_due() {
        let mut turns = Turns::default();
        // More tenants than turns, the first ones with many replays.
        let mut all: Vec<Due> = (0..300).map(|replay| due(replay as i32 % 6, replay)).collect();
        all.push(due(99, 999));
        let mut before = 0;
        loop {
            let begun = begin_all(&mut turns, &all);
            if begun.contains(&due(99, 999)) {
                break;
            }
            before += begun.len();
            begun.into_iter().for_each(|one| turns.end(one));
        }
        assert!(before <= 6, "{before} turns of others came first");
    }

    #[test]
    fn a_turn_that_ended_leaves_nothing_behind() {
        let mut turns = Turns::default();
        for number in 0..3 * REMEMBERED as i64 {
            let one = due(number as i32, number);
            turns.begin(one);
            turns.end(one);
        }
        assert!(turns.taken.is_empty() && turns.busy.is_empty());
        assert!(turns.latest.len() as u64 <= 2 * REMEMBERED);
    }
}
