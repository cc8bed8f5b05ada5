//! Releases shards without making their endpoints wait for one that hangs. Pure.
//!
//! A shard can be released only when none of its attempts is in flight; otherwise its next owner would send
//! concurrently. While an attempt takes long, only its own endpoint starts nothing more. Once none does, all
//! endpoints of the shard stop until the remaining attempts end, and resume if that takes too long.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use postrider_proto::Shard;

use crate::deliver::{breaker::Monotonic, lane::Lane};

/// Attempts in flight for longer than this do not stop other endpoints.
const LONG: Duration = Duration::from_secs(2);
/// The longest that endpoints of a shard are stopped.
const STOPPED_MAX: Duration = Duration::from_secs(3);
/// Check interval when nothing ends.
const CHECK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waiting for attempts that take long.
    Waiting,
    Stopped {
        since: Monotonic,
    },
    /// Reported as having nothing in flight.
    Drained,
}

#[derive(Debug, Default)]
pub(crate) struct Draining {
    shards: HashMap<Shard, Phase>,
    /// Something has ended since the last check.
    ended: bool,
    checked_at: Monotonic,
}

/// Result of a check.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) drained: Vec<Shard>,
    /// Shards whose endpoints resume.
    pub(crate) resumed: Vec<Shard>,
}

impl Draining {
    pub(crate) fn begin(&mut self, shard: Shard) {
        self.shards.insert(shard, Phase::Waiting);
        self.ended = true;
    }

    pub(crate) fn remove(&mut self, shard: Shard) {
        self.shards.remove(&shard);
    }

    /// Whether no attempt of the shard may start.
    pub(crate) fn is_stopped(&self, shard: Shard) -> bool {
        matches!(
            self.shards.get(&shard),
            Some(Phase::Stopped { .. } | Phase::Drained)
        )
    }

    /// Whether a lane may start an attempt.
    pub(crate) fn lets_start(&self, lane: &Lane, now: Monotonic) -> bool {
        match self.shards.get(&lane.endpoint().shard) {
            None => true,
            Some(Phase::Waiting) => !takes_long(lane, now),
            Some(Phase::Stopped { .. } | Phase::Drained) => false,
        }
    }

    /// An attempt of the shard has ended or was recorded.
    pub(crate) fn ended(&mut self, shard: Shard) {
        self.ended |= self.shards.contains_key(&shard);
    }

    pub(crate) fn needs_check(&self, now: Monotonic) -> bool {
        let undrained = self.shards.values().any(|phase| *phase != Phase::Drained);
        undrained && (self.ended || now >= self.checked_at + CHECK_EVERY)
    }

    /// `leaving`: the process is shutting down and starts no attempt at all.
    pub(crate) fn check<'l>(
        &mut self,
        lanes: impl Iterator<Item = &'l Lane>,
        now: Monotonic,
        leaving: bool,
    ) -> Progress {
        (self.ended, self.checked_at) = (false, now);
        let (mut busy, mut long) = (HashSet::new(), HashSet::new());
        for lane in lanes.filter(|lane| self.shards.contains_key(&lane.endpoint().shard)) {
            let shard = lane.endpoint().shard;
            if !lane.is_drained() {
                busy.insert(shard);
            }
            if takes_long(lane, now) {
                long.insert(shard);
            }
        }
        let mut progress = Progress::default();
        for (shard, phase) in &mut self.shards {
            if *phase == Phase::Waiting && !long.contains(shard) {
                *phase = Phase::Stopped { since: now };
            }
            match *phase {
                Phase::Drained => {}
                Phase::Stopped { .. } if !busy.contains(shard) => {
                    *phase = Phase::Drained;
                    progress.drained.push(*shard);
                }
                Phase::Stopped { since } if now >= since + STOPPED_MAX && !leaving => {
                    *phase = Phase::Waiting;
                    progress.resumed.push(*shard);
                }
                Phase::Stopped { .. } | Phase::Waiting => {}
            }
        }
        progress
    }
}

fn takes_long(lane: &Lane, now: Monotonic) -> bool {
    now.checked_sub(LONG)
        .is_some_and(|before| lane.has_attempt_before(before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deliver::{endpoint::Endpoint, lane::AttemptResult, queued_delivery::QueuedDelivery};
    use postrider_proto::{EndpointState, Epoch, EventId, TenantId, TypeId};
    use std::sync::Arc;

    const SHARD: Shard = Shard(0);

    fn lane_with(events: u128) -> Lane {
        let endpoint = Endpoint::for_simulation(4, false, EndpointState::Active);
        let mut lane = Lane::new(Arc::new(endpoint), Epoch(1));
        for event in 1..=events {
            lane.offer(QueuedDelivery {
                event: EventId(uuid::Uuid::from_u128(event)),
                tenant: TenantId(1),
                type_id: TypeId(1),
                attempt: 0,
                step: 0,
                key: None,
                replay: None,
            });
        }
        lane
    }

    fn seconds(seconds: u64) -> Monotonic {
        Duration::from_secs(seconds)
    }

    fn end(lane: &mut Lane, event: u128, now: Monotonic) {
        let event = EventId(uuid::Uuid::from_u128(event));
        let result = AttemptResult {
            success: true,
            slow: false,
            about_endpoint: true,
        };
        lane.attempt_ended(event, 1, result, now);
        lane.recorded(event, 1, None);
    }

    #[test]
    fn others_go_on_while_one_takes_long_and_stop_only_for_a_moment() {
        let (mut hanging, mut other) = (lane_with(1), lane_with(3));
        let mut draining = Draining::default();
        assert!(hanging.pick(seconds(0)).is_some());
        draining.begin(SHARD);
        draining.check([&hanging, &other].into_iter(), seconds(5), false);
        assert!(!draining.is_stopped(SHARD), "one takes long");
        assert!(!draining.lets_start(&hanging, seconds(5)));
        assert!(draining.lets_start(&other, seconds(5)));
        assert!(other.pick(seconds(50)).is_some());
        end(&mut hanging, 1, seconds(50));
        let progress = draining.check([&hanging, &other].into_iter(), seconds(50), false);
        assert!(draining.is_stopped(SHARD) && progress.drained.is_empty());
        assert!(!draining.lets_start(&other, seconds(50)));
        end(&mut other, 1, seconds(51));
        let progress = draining.check([&hanging, &other].into_iter(), seconds(51), false);
        assert_eq!(progress.drained, [SHARD]);
        assert!(!draining.needs_check(seconds(60)), "reported once");
    }

    #[test]
    fn endpoints_are_not_stopped_for_one_that_begins_to_hang() {
        let mut lane = lane_with(2);
        let mut draining = Draining::default();
        assert!(lane.pick(seconds(10)).is_some());
        draining.begin(SHARD);
        draining.check([&lane].into_iter(), seconds(10), false);
        assert!(draining.is_stopped(SHARD));
        let progress = draining.check([&lane].into_iter(), seconds(14), false);
        assert_eq!(progress.resumed, [SHARD]);
        assert!(!draining.is_stopped(SHARD) && !draining.lets_start(&lane, seconds(14)));
        let mut leaving = Draining::default();
        leaving.begin(SHARD);
        leaving.check([&lane].into_iter(), seconds(10), true);
        let progress = leaving.check([&lane].into_iter(), seconds(14), true);
        assert!(
            progress.resumed.is_empty(),
            "nothing is started by one that leaves"
        );
    }
}
