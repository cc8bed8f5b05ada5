//! In-flight capacity of this process: which attempts hold it and which lanes wait for it.
//!
//! Invariants: each permit is held by one attempt and released when that attempt ends; hanging endpoints never hold
//! so much that nothing else can start; no lane holds part of what it needs while waiting for the rest. Only
//! `engine.rs` acquires capacity.
//!
//! Every share is divided by dynamic thresholds (`division.rs`), so that no number of hanging endpoints exhausts it.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use postrider_proto::{EndpointId, EventId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::deliver::{
    breaker::Monotonic,
    division::{Division, Holder},
    lane::Pace,
};

/// Unrecorded results after which no new attempt starts.
const UNRECORDED_MAX: usize = 16 * 1024;
/// Attempts of a lane that need no permit of [`Share::More`].
const FIRST_ATTEMPTS: usize = 2;
/// An attempt that takes longer counts as slow, and so does its endpoint.
pub(crate) const SLOW: Duration = Duration::from_secs(1);
/// A tenant may hold this many times the free total capacity: three quarters when it is alone.
const TENANT_TIMES_FREE: usize = 3;
/// Waiting lanes checked per call, so that many blocked ones cost little.
const CALLS_MAX: usize = 256;

/// Parts of the capacity, each bounded separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    /// Total capacity, divided between tenants only.
    Wire,
    /// Lanes that failed or were slow recently, half of the total: a thousand hanging endpoints starve nobody.
    Slow,
    /// Lanes without any response yet, a quarter.
    Unknown,
    /// In-flight attempts of a lane beyond its first two, three quarters: an endpoint that starts to hang keeps its
    /// whole bulkhead for a while, and others must be able to start meanwhile.
    More,
}

impl Share {
    const COUNT: usize = 4;
    const ALL: [Self; Self::COUNT] = [Self::Wire, Self::Slow, Self::Unknown, Self::More];

    fn size(self, wire: usize) -> usize {
        match self {
            Self::Wire => wire,
            Self::Slow => (wire / 2).max(1),
            Self::Unknown => (wire / 4).max(1),
            Self::More => wire - wire / 4,
        }
    }
}

/// One attempt: its endpoint, event and number.
pub(crate) type Attempt = (EndpointId, EventId, u16);

/// Shares held by an attempt in flight.
struct AttemptShares {
    holder: Holder,
    shares: [bool; Share::COUNT],
}

/// One share: how much of it is taken, by whom, and which lanes wait for it.
struct Part {
    share: Share,
    held: Division,
    /// Lanes that could send if this share had more capacity, each once.
    waiting: VecDeque<Holder>,
    members: HashSet<EndpointId>,
    /// How many of them have not been checked since capacity was last released.
    unchecked: usize,
}

impl Part {
    fn new(share: Share, wire: usize) -> Self {
        Self {
            share,
            held: Division::new(share.size(wire)),
            waiting: VecDeque::new(),
            members: HashSet::new(),
            unchecked: 0,
        }
    }

    fn admits(&self, holder: Holder) -> bool {
        match self.share {
            Share::Wire => self.held.of_tenant(holder) < self.held.free() * TENANT_TIMES_FREE,
            Share::Slow | Share::Unknown | Share::More => self.held.admits(holder, 1),
        }
    }

    fn give_back(&mut self, holder: Holder) {
        self.held.give_back(holder, 1);
        self.unchecked = self.waiting.len();
    }

    fn wait(&mut self, holder: Holder) {
        if self.members.insert(holder.endpoint) {
            self.waiting.push_back(holder);
        }
    }

    /// Lanes that may continue, at most as many as there is free capacity.
    fn call(&mut self, called: &mut Vec<EndpointId>) {
        let (mut free, mut looks) = (self.held.free(), CALLS_MAX);
        while self.unchecked > 0 && free > 0 && looks > 0 {
            let Some(holder) = self.waiting.pop_front() else {
                self.unchecked = 0;
                return;
            };
            self.unchecked -= 1;
            looks -= 1;
            if self.admits(holder) {
                free -= 1;
                self.members.remove(&holder.endpoint);
                called.push(holder.endpoint);
            } else {
                self.waiting.push_back(holder);
            }
        }
    }
}

pub(crate) struct Capacity {
    parts: [Part; Share::COUNT],
    result_permits: Arc<Semaphore>,
    held: HashMap<Attempt, AttemptShares>,
    /// Attempts in start order, until they are found finished or slow.
    begun: VecDeque<(Monotonic, Attempt)>,
}

impl Capacity {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            parts: Share::ALL.map(|share| Part::new(share, count)),
            result_permits: Arc::new(Semaphore::new(UNRECORDED_MAX.max(count))),
            held: HashMap::new(),
            begun: VecDeque::new(),
        }
    }

    fn part(&self, share: Share) -> &Part {
        &self.parts[share as usize]
    }

    pub(crate) fn count(&self) -> usize {
        self.part(Share::Wire).held.size()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.part(Share::Wire).held.taken()
    }

    pub(crate) fn in_use(&self) -> bool {
        self.in_flight() > 0
    }

    /// Attempts in flight plus results not yet recorded.
    pub(crate) fn unrecorded(&self) -> usize {
        UNRECORDED_MAX
            .max(self.count())
            .saturating_sub(self.result_permits.available_permits())
    }

    /// A permit for one more unrecorded result.
    pub(crate) fn result_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.result_permits.clone().try_acquire_owned().ok()
    }

    pub(crate) fn any_free(&self) -> bool {
        self.part(Share::Wire).held.free() > 0
    }

    /// Shares needed by an attempt of a lane with this pace and number in flight.
    fn needed(pace: Pace, in_flight: usize) -> [bool; Share::COUNT] {
        let mut needed = [false; Share::COUNT];
        needed[Share::Wire as usize] = true;
        needed[Share::Slow as usize] = pace == Pace::Slow;
        needed[Share::Unknown as usize] = pace == Pace::Unknown;
        needed[Share::More as usize] = in_flight >= FIRST_ATTEMPTS;
        needed
    }

    /// Whether a lane with this pace and number in flight may start an attempt; otherwise the share it must wait for.
    pub(crate) fn check(&self, holder: Holder, pace: Pace, in_flight: usize) -> Result<(), Share> {
        let needed = Self::needed(pace, in_flight);
        let is_full = |share: &Share| needed[*share as usize] && !self.part(*share).admits(holder);
        Share::ALL.into_iter().find(is_full).map_or(Ok(()), Err)
    }

    /// Acquires the capacity that [`check`](Self::check) found.
    pub(crate) fn begin(
        &mut self,
        now: Monotonic,
        attempt: Attempt,
        holder: Holder,
        pace: Pace,
        in_flight: usize,
    ) {
        let shares = Self::needed(pace, in_flight);
        for share in Share::ALL.into_iter().filter(|share| shares[*share as usize]) {
            self.parts[share as usize].held.take(holder, 1);
        }
        let before = self.held.insert(attempt, AttemptShares { holder, shares });
        // The shard was lost and regained while the same attempt was still in flight.
        if let Some(before) = before {
            self.give_back(&before);
        }
        self.begun.push_back((now, attempt));
    }

    /// Releases the capacity of a finished attempt.
    pub(crate) fn leave(&mut self, attempt: &Attempt) {
        if let Some(held) = self.held.remove(attempt) {
            self.give_back(&held);
        }
    }

    fn give_back(&mut self, held: &AttemptShares) {
        for share in Share::ALL {
            if held.shares[share as usize] {
                self.parts[share as usize].give_back(held.holder);
            }
        }
    }

    pub(crate) fn wait_for(&mut self, share: Share, holder: Holder) {
        self.parts[share as usize].wait(holder);
    }

    /// Waiting lanes that may have capacity now.
    pub(crate) fn called(&mut self) -> Vec<EndpointId> {
        let mut called = Vec::new();
        for part in &mut self.parts {
            part.call(&mut called);
        }
        called
    }

    /// More waiting lanes are to be checked than fit into one call.
    pub(crate) fn has_more_to_call(&self) -> bool {
        self.parts
            .iter()
            .any(|part| part.unchecked > 0 && part.held.free() > 0)
    }

    /// Endpoints with an attempt that just became slow. Such an attempt moves to the slow share, which frees the
    /// unknown share long before its timeout. While the slow share is full it keeps its current shares and is checked
    /// again later.
    pub(crate) fn slowed(&mut self, now: Monotonic) -> Vec<EndpointId> {
        let mut slowed = Vec::new();
        while let Some((began, attempt)) = self.begun.front().copied()
            && began + SLOW <= now
        {
            self.begun.pop_front();
            let Some(held) = self.held.get_mut(&attempt) else {
                continue;
            };
            slowed.push(attempt.0);
            if held.shares[Share::Slow as usize] {
                continue;
            }
            let holder = held.holder;
            if !self.parts[Share::Slow as usize].admits(holder) {
                self.begun.push_back((now, attempt));
                continue;
            }
            for share in [Share::Unknown, Share::More] {
                if std::mem::take(&mut held.shares[share as usize]) {
                    self.parts[share as usize].give_back(holder);
                }
            }
            held.shares[Share::Slow as usize] = true;
            self.parts[Share::Slow as usize].held.take(holder, 1);
        }
        slowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deliver::division::holder;

    /// Attempts of one lane, each of a different event.
    struct World {
        capacity: Capacity,
        events: u128,
    }

    impl World {
        fn new(count: usize) -> Self {
            let capacity = Capacity::new(count);
            Self { capacity, events: 0 }
        }

        fn begin(
            &mut self,
            at: Monotonic,
            holder: Holder,
            pace: Pace,
            in_flight: usize,
        ) -> Result<Attempt, Share> {
            self.capacity.check(holder, pace, in_flight)?;
            self.events += 1;
            let attempt = (holder.endpoint, EventId(uuid::Uuid::from_u128(self.events)), 1);
            self.capacity.begin(at, attempt, holder, pace, in_flight);
            Ok(attempt)
        }

        /// As many as there is capacity for.
        fn fill(&mut self, holder: Holder, pace: Pace) -> Vec<Attempt> {
            let mut begun = Vec::new();
            while let Ok(attempt) = self.begin(Duration::ZERO, holder, pace, begun.len()) {
                begun.push(attempt);
            }
            begun
        }
    }

    #[test]
    fn what_hangs_at_first_contact_makes_room_for_other_unknown_lanes_after_a_second() {
        let mut world = World::new(16);
        for lane in 0..4 {
            let began = world.begin(Duration::ZERO, holder(lane, lane), Pace::Unknown, 0);
            assert!(began.is_ok());
        }
        assert_eq!(
            world.capacity.check(holder(9, 9), Pace::Unknown, 0),
            Err(Share::Unknown)
        );
        world.capacity.wait_for(Share::Unknown, holder(9, 9));
        assert_eq!(world.capacity.called(), []);
        assert_eq!(world.capacity.slowed(SLOW / 2), []);
        assert_eq!(world.capacity.slowed(SLOW), [0, 1, 2, 3].map(EndpointId));
        assert_eq!(world.capacity.called(), [EndpointId(9)]);
        assert_eq!(world.capacity.check(holder(9, 9), Pace::Unknown, 0), Ok(()));
    }

    #[test]
    fn slow_ones_hold_at_most_half_of_the_wire_and_every_place_comes_back() {
        let mut world = World::new(8);
        let slow: Vec<Attempt> = (0..4)
            .filter_map(|lane| {
                world
                    .begin(Duration::ZERO, holder(lane, lane), Pace::Slow, 0)
                    .ok()
            })
            .collect();
        assert_eq!(slow.len(), 4);
        assert_eq!(
            world.capacity.check(holder(5, 5), Pace::Slow, 0),
            Err(Share::Slow)
        );
        // A fast lane that begins to hang finds no slow capacity, keeps its own, and is checked again.
        let fast = world
            .begin(Duration::ZERO, holder(7, 7), Pace::Fast, 1)
            .expect("a place");
        assert_eq!(world.capacity.slowed(SLOW).last(), Some(&EndpointId(7)));
        world.capacity.leave(&slow[0]);
        assert_eq!(world.capacity.slowed(SLOW * 2), [EndpointId(7)]);
        assert_eq!(
            world.capacity.check(holder(5, 5), Pace::Slow, 0),
            Err(Share::Slow)
        );
        for attempt in slow.iter().skip(1).chain([&fast]) {
            world.capacity.leave(attempt);
        }
        assert!(!world.capacity.in_use());
        assert!(world.capacity.parts.iter().all(|part| part.held.is_empty()));
    }

    #[test]
    fn however_many_hang_a_lane_that_holds_nothing_finds_a_place() {
        for hogs in [1, 2, 5, 20, 100] {
            let mut world = World::new(4096);
            for lane in 0..hogs {
                // Two lanes for each tenant.
                world.fill(holder(lane, lane / 2), Pace::Slow);
            }
            let healthy = holder(-1, -1);
            assert_eq!(
                world.capacity.check(healthy, Pace::Slow, 0),
                Ok(()),
                "beside {hogs} that hang"
            );
            assert_eq!(world.capacity.check(healthy, Pace::Fast, 5), Ok(()));
            let neighbour = world.capacity.check(holder(-2, 0), Pace::Slow, 0);
            assert!(
                hogs > 5 || neighbour == Ok(()),
                "of the same tenant as two that hang"
            );
        }
    }

    #[test]
    fn a_lane_alone_gets_over_a_fifth_of_the_wire_and_a_tenant_leaves_a_quarter_of_the_wire() {
        let mut world = World::new(4096);
        assert_eq!(world.fill(holder(1, 1), Pace::Fast).len(), FIRST_ATTEMPTS + 896);
        let mut world = World::new(4096);
        for lane in 0..3_000 {
            // Never more than the first two of a lane, which need only the total share.
            let _ = world.begin(Duration::ZERO, holder(lane, 1), Pace::Fast, 0);
            let _ = world.begin(Duration::ZERO, holder(lane, 1), Pace::Fast, 1);
        }
        assert_eq!(world.capacity.in_flight(), 3072);
        assert_eq!(
            world.capacity.check(holder(1, 1), Pace::Fast, 0),
            Err(Share::Wire)
        );
        assert_eq!(world.capacity.check(holder(9_999, 2), Pace::Fast, 0), Ok(()));
    }

    #[test]
    fn an_attempt_that_begins_again_before_it_has_left_leaves_nothing_behind() {
        let mut world = World::new(64);
        let attempt = world
            .begin(Duration::ZERO, holder(1, 1), Pace::Slow, 5)
            .expect("a place");
        world
            .capacity
            .begin(Duration::ZERO, attempt, holder(1, 1), Pace::Unknown, 0);
        world.capacity.leave(&attempt);
        world.capacity.leave(&attempt);
        assert!(world.capacity.parts.iter().all(|part| part.held.is_empty()));
    }

    #[test]
    fn a_lane_that_waits_is_called_although_many_before_it_may_not_go() {
        let mut world = World::new(4096);
        let held = world.fill(holder(0, 0), Pace::Slow);
        for lane in 1..1_000 {
            world.capacity.wait_for(Share::Slow, holder(0, 0));
            world.capacity.wait_for(Share::Slow, holder(-lane, 0));
        }
        world.capacity.wait_for(Share::Slow, holder(1, 1));
        world.capacity.leave(&held[0]);
        let mut called = Vec::new();
        while world.capacity.has_more_to_call() {
            called.extend(world.capacity.called());
        }
        assert!(called.contains(&EndpointId(1)));
    }
}
