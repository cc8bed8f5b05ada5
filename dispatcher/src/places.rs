//! Places on the wire of this process: who holds one, and who waits for one.
//!
//! Invariants: each place is held by one attempt and is free when that attempt has left; what hangs never holds so many
//! that nothing else can begin. Kept by `engine.rs`, which alone takes places.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use postrider_proto::{EndpointId, EventId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{breaker::Monotonic, lane::Pace};

/// Results that wait for the database, before nothing new is sent.
const UNRECORDED_MAX: usize = 16 * 1024;
/// Attempts of a lane that need no place of [`Share::More`].
const FIRST_PLACES: usize = 2;
/// An attempt that takes longer than this shares its places with the other slow ones, and so does its endpoint.
pub(crate) const SLOW: Duration = Duration::from_secs(1);

/// Parts of the wire that some attempts share, each bounded.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Share {
    /// Of lanes that failed or were slow lately, half of the wire: a thousand that hang starve nobody.
    Slow,
    /// Of lanes that have not answered yet, a quarter.
    Unknown,
    /// Of what a lane has on the wire beyond its first two, three quarters: one that begins to hang holds its whole
    /// bulkhead for a while, and others must be able to begin meanwhile.
    More,
}

impl Share {
    const ALL: [Self; 3] = [Self::Slow, Self::Unknown, Self::More];
}

/// One attempt: its endpoint, event and number.
pub(crate) type Attempt = (EndpointId, EventId, u16);

/// What an attempt holds while it is on the wire.
pub(crate) struct Permits {
    _wire: OwnedSemaphorePermit,
    shares: [Option<OwnedSemaphorePermit>; 3],
}

/// Lanes that wait for a place of one share, each once.
#[derive(Default)]
struct Waiting {
    queue: VecDeque<EndpointId>,
    members: HashSet<EndpointId>,
}

pub(crate) struct Places {
    wire: Arc<Semaphore>,
    shares: [Arc<Semaphore>; 3],
    room: Arc<Semaphore>,
    count: usize,
    /// Lanes that could send if a share were not full. What changes a lane sets it going again by itself, so that one
    /// which no longer needs that share does not wait for it.
    waiting: [Waiting; 3],
    held: HashMap<Attempt, Permits>,
    /// Attempts in the order they began, until they are found to have left or to be slow.
    begun: VecDeque<(Monotonic, Attempt)>,
}

impl Places {
    pub(crate) fn new(count: usize) -> Self {
        let semaphore = |n| Arc::new(Semaphore::new(n));
        Self {
            wire: semaphore(count),
            shares: Share::ALL.map(|share| {
                semaphore(match share {
                    Share::Slow => (count / 2).max(1),
                    Share::Unknown => (count / 4).max(1),
                    Share::More => count - count / 4,
                })
            }),
            room: semaphore(UNRECORDED_MAX.max(count)),
            count,
            waiting: Default::default(),
            held: HashMap::new(),
            begun: VecDeque::new(),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.count.saturating_sub(self.wire.available_permits())
    }

    pub(crate) fn in_use(&self) -> bool {
        self.in_flight() > 0
    }

    /// Attempts under way and results that wait for the database.
    pub(crate) fn unrecorded(&self) -> usize {
        UNRECORDED_MAX
            .max(self.count)
            .saturating_sub(self.room.available_permits())
    }

    /// Room for one more result.
    pub(crate) fn room(&self) -> Option<OwnedSemaphorePermit> {
        self.room.clone().try_acquire_owned().ok()
    }

    pub(crate) fn any_free(&self) -> bool {
        self.wire.available_permits() > 0
    }

    /// A place for a lane of this pace with so many on the wire, or the share of it that is full.
    pub(crate) fn take(&self, pace: Pace, on_wire: usize) -> Result<Option<Permits>, Share> {
        let Ok(wire) = self.wire.clone().try_acquire_owned() else {
            return Ok(None);
        };
        let mut permits = Permits {
            _wire: wire,
            shares: Default::default(),
        };
        let of_pace = match pace {
            Pace::Fast => None,
            Pace::Slow => Some(Share::Slow),
            Pace::Unknown => Some(Share::Unknown),
        };
        let more = (on_wire >= FIRST_PLACES).then_some(Share::More);
        for share in of_pace.into_iter().chain(more) {
            let permit = self.shares[share as usize].clone().try_acquire_owned();
            permits.shares[share as usize] = Some(permit.map_err(|_| share)?);
        }
        Ok(Some(permits))
    }

    pub(crate) fn begin(&mut self, now: Monotonic, attempt: Attempt, permits: Permits) {
        self.held.insert(attempt, permits);
        self.begun.push_back((now, attempt));
    }

    /// The attempt is over: its place is free.
    pub(crate) fn leave(&mut self, attempt: &Attempt) {
        self.held.remove(attempt);
    }

    pub(crate) fn wait_for(&mut self, share: Share, lane: EndpointId) {
        let waiting = &mut self.waiting[share as usize];
        if waiting.members.insert(lane) {
            waiting.queue.push_back(lane);
        }
    }

    /// Lanes for which there is a place now, as many as there are places.
    pub(crate) fn called(&mut self) -> Vec<EndpointId> {
        let mut called = Vec::new();
        for share in Share::ALL {
            let waiting = &mut self.waiting[share as usize];
            for _ in 0..self.shares[share as usize].available_permits() {
                let Some(lane) = waiting.queue.pop_front() else {
                    break;
                };
                waiting.members.remove(&lane);
                called.push(lane);
            }
        }
        called
    }

    /// Endpoints with an attempt that has turned out slow just now. It moves to the places of slow ones, so that those for
    /// unknown lanes are free for others long before its time limit; while there is none it stays and is asked again.
    pub(crate) fn slowed(&mut self, now: Monotonic) -> Vec<EndpointId> {
        let mut slowed = Vec::new();
        while let Some((began, attempt)) = self.begun.front().copied()
            && began + SLOW <= now
        {
            self.begun.pop_front();
            let Some(permits) = self.held.get_mut(&attempt) else {
                continue;
            };
            slowed.push(attempt.0);
            if permits.shares[Share::Slow as usize].is_some() {
                continue;
            }
            match self.shares[Share::Slow as usize].clone().try_acquire_owned() {
                Ok(permit) => permits.shares = [Some(permit), None, None],
                Err(_) => self.begun.push_back((now, attempt)),
            }
        }
        slowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(endpoint: i32) -> Attempt {
        (EndpointId(endpoint), EventId::LOWEST, 1)
    }

    #[test]
    fn what_hangs_at_first_contact_makes_room_for_other_unknown_lanes_after_a_second() {
        let mut places = Places::new(16);
        for endpoint in 0..4 {
            let permits = places.take(Pace::Unknown, 0).ok().flatten().expect("a place");
            places.begin(Duration::ZERO, attempt(endpoint), permits);
        }
        assert!(matches!(places.take(Pace::Unknown, 0), Err(Share::Unknown)));
        places.wait_for(Share::Unknown, EndpointId(9));
        assert_eq!(places.called(), []);
        assert_eq!(places.slowed(SLOW / 2), []);
        assert_eq!(places.slowed(SLOW), [0, 1, 2, 3].map(EndpointId));
        assert_eq!(places.called(), [EndpointId(9)]);
        assert!(matches!(places.take(Pace::Unknown, 0), Ok(Some(_))));
    }

    #[test]
    fn slow_ones_hold_at_most_half_of_the_wire() {
        let mut places = Places::new(8);
        for endpoint in 0..4 {
            let permits = places.take(Pace::Slow, 0).ok().flatten().expect("a place");
            places.begin(Duration::ZERO, attempt(endpoint), permits);
        }
        assert!(matches!(places.take(Pace::Slow, 0), Err(Share::Slow)));
        // A fast one that begins to hang finds no slow place, keeps its own, and is asked again.
        let permits = places.take(Pace::Fast, 5).ok().flatten().expect("a place");
        places.begin(Duration::ZERO, attempt(7), permits);
        assert_eq!(places.slowed(SLOW).last(), Some(&EndpointId(7)));
        places.leave(&attempt(0));
        assert_eq!(places.slowed(SLOW * 2), [EndpointId(7)]);
        assert!(matches!(places.take(Pace::Slow, 0), Err(Share::Slow)));
        for endpoint in [1, 2, 3, 7] {
            places.leave(&attempt(endpoint));
        }
        assert!(!places.in_use());
    }
}
