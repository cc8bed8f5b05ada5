//! The rate limit of one endpoint, using `governor`. The lane passes in the time, so that it can be simulated.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use governor::{
    Quota, RateLimiter,
    clock::Clock,
    middleware::NoOpMiddleware,
    nanos::Nanos,
    state::{InMemoryState, NotKeyed},
};

use crate::deliver::breaker::Monotonic;

/// At most this fraction of a second's attempts is sent at once.
const BURST_SHARE: u32 = 20;

#[derive(Debug)]
pub(crate) struct Rate {
    per_second: NonZeroU32,
    clock: LaneClock,
    limiter: RateLimiter<NotKeyed, InMemoryState, LaneClock, NoOpMiddleware<Nanos>>,
}

#[derive(Debug, Clone, Default)]
struct LaneClock(Arc<AtomicU64>);

impl Clock for LaneClock {
    type Instant = Nanos;

    fn now(&self) -> Nanos {
        Nanos::from(self.0.load(Ordering::Relaxed))
    }
}

impl Rate {
    pub(crate) fn new(per_second: NonZeroU32) -> Self {
        let clock = LaneClock::default();
        let burst = NonZeroU32::new(per_second.get() / BURST_SHARE).unwrap_or(NonZeroU32::MIN);
        let quota = Quota::per_second(per_second).allow_burst(burst);
        Self {
            per_second,
            limiter: RateLimiter::direct_with_clock(quota, clock.clone()),
            clock,
        }
    }

    pub(crate) fn per_second(&self) -> NonZeroU32 {
        self.per_second
    }

    /// Takes one attempt, or returns when the next may be taken.
    pub(crate) fn take(&self, now: Monotonic) -> Result<(), Monotonic> {
        self.clock.0.store(
            u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            Ordering::Relaxed,
        );
        self.limiter.check().map_err(|until| {
            now + until
                .wait_time_from(self.clock.now())
                .max(Duration::from_nanos(1))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn exactly_the_rate_and_its_burst(per_second in 1_u32..2_000) {
            let rate = Rate::new(NonZeroU32::new(per_second).expect("not zero"));
            let (mut now, mut taken) = (Duration::ZERO, 0_u32);
            while now < Duration::from_secs(2) {
                match rate.take(now) {
                    Ok(()) => taken += 1,
                    Err(at) => now = at,
                }
            }
            prop_assert!(taken <= 2 * per_second + per_second / BURST_SHARE + 1, "{taken}");
            prop_assert!(taken + 1 >= 2 * per_second, "{taken}");
        }

        #[test]
        fn the_wait_is_exact(per_second in 1_u32..1_000) {
            let rate = Rate::new(NonZeroU32::new(per_second).expect("not zero"));
            let mut now = Duration::ZERO;
            for _ in 0..50 {
                if let Err(at) = rate.take(now) {
                    prop_assert!(at > now && at <= now + Duration::from_secs(1));
                    prop_assert!(rate.take(at - Duration::from_nanos(2)).is_err());
                    prop_assert!(rate.take(at).is_ok());
                    now = at;
                }
            }
        }
    }
}
