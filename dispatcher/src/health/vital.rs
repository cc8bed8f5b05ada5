//! The signs of life of a dispatcher: its lease, its engine and its reads of the queue.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use super::{Reason, STUCK_AFTER};
use crate::{lock::lock, ownership::lease::Lease};

/// A queue that was last read longer ago counts as delayed by the dispatcher: nobody knows what was emitted since.
/// Longer than an idle reader waits.
const UNREAD_AFTER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Vital {
    lease: Lease,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    engine_at: Instant,
    read_at: Instant,
    load: Load,
}

/// What the engine reports about once a second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Load {
    pub(crate) shards: usize,
    /// Seconds.
    pub(crate) oldest_by_endpoint: f64,
    pub(crate) oldest_by_dispatcher: f64,
}

impl Vital {
    pub(crate) fn new(lease: Lease) -> Self {
        let now = Instant::now();
        let seen = Seen {
            engine_at: now,
            read_at: now,
            load: Load::default(),
        };
        Self {
            lease,
            seen: Mutex::new(seen),
        }
    }

    pub(crate) fn engine_runs(&self, load: Load) {
        let mut seen = lock(&self.seen);
        seen.engine_at = Instant::now();
        seen.load = load;
    }

    pub(crate) fn queue_was_read(&self) {
        lock(&self.seen).read_at = Instant::now();
    }

    pub(crate) fn has_lease(&self) -> bool {
        self.lease.is_valid()
    }

    pub(crate) fn reasons(&self) -> Vec<Reason> {
        self.reasons_at(Instant::now())
    }

    fn reasons_at(&self, now: Instant) -> Vec<Reason> {
        let seen = lock(&self.seen);
        let (engine, read) = (now - seen.engine_at, now - seen.read_at);
        let no_lease = (!self.lease.is_valid_at(now)).then_some(Reason::NoLease);
        let stuck = (engine > STUCK_AFTER).then_some(Reason::EngineStuck(engine));
        let unread = (read > STUCK_AFTER).then_some(Reason::QueueUnread(read));
        no_lease.into_iter().chain(stuck).chain(unread).collect()
    }

    /// As it is now: shards count only under a valid lease, and what waited when the engine last reported has waited
    /// longer since.
    pub(crate) fn load(&self) -> Load {
        self.load_at(Instant::now())
    }

    fn load_at(&self, now: Instant) -> Load {
        let seen = lock(&self.seen);
        let (silent, unread) = (now - seen.engine_at, now - seen.read_at);
        let is_alive = silent <= STUCK_AFTER && self.lease.is_valid_at(now);
        let since = |oldest: f64| match oldest > 0.0 {
            true => oldest + silent.as_secs_f64(),
            false => 0.0,
        };
        let mut by_dispatcher = since(seen.load.oldest_by_dispatcher);
        if unread > UNREAD_AFTER {
            by_dispatcher = by_dispatcher.max(unread.as_secs_f64());
        }
        Load {
            shards: if is_alive { seen.load.shards } else { 0 },
            oldest_by_endpoint: since(seen.load.oldest_by_endpoint),
            oldest_by_dispatcher: by_dispatcher,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn vital() -> Vital {
        let vital = Vital::new(Lease::new());
        vital.engine_runs(Load {
            shards: 64,
            oldest_by_endpoint: 5.0,
            oldest_by_dispatcher: 0.0,
        });
        vital
    }

    #[test]
    fn shards_count_only_under_a_valid_lease() {
        let (vital, now) = (vital(), Instant::now());
        assert_eq!(vital.load_at(now).shards, 0);
        assert_eq!(vital.reasons_at(now), [Reason::NoLease]);
        vital.lease.extend(now + Duration::from_secs(5));
        assert_eq!(vital.load_at(now).shards, 64);
        assert!(vital.reasons_at(now).is_empty());
        let later = now + Duration::from_secs(6);
        assert_eq!(vital.load_at(later).shards, 0, "the lease is over");
        assert_eq!(vital.reasons_at(later), [Reason::NoLease]);
    }

    #[test]
    fn ages_grow_while_nothing_is_heard() {
        let (vital, now) = (vital(), Instant::now());
        vital.lease.extend(now + 10 * MINUTE);
        assert_eq!(vital.load_at(now).oldest_by_dispatcher, 0.0);
        let later = vital.load_at(now + MINUTE);
        assert!(later.oldest_by_endpoint >= 65.0, "{later:?}");
        assert!(
            later.oldest_by_dispatcher >= 59.0,
            "the queue was not read: {later:?}"
        );
        assert_eq!(later.shards, 0, "an engine that is stuck owns nothing");
        let reasons = vital.reasons_at(now + MINUTE);
        assert!(
            matches!(reasons[..], [Reason::EngineStuck(_), Reason::QueueUnread(_)]),
            "{reasons:?}"
        );
    }
}
