//! Request rate limits per API key, so that one runaway client does not use up the others' capacity.
//! Invariant: one entry for each valid key; unknown keys are not stored.

use std::num::NonZeroU32;

use governor::{
    DefaultKeyedRateLimiter, Quota, RateLimiter,
    clock::{Clock, DefaultClock},
};
use postrider_proto::state::KeyRole;

use crate::http::problem::Problem;

/// For an admin or producer key. The team's own services emit with these.
pub const REQUEST_RATE_DEFAULT: NonZeroU32 = NonZeroU32::new(10_000).expect("not zero");
/// For a tenant key, which a customer holds.
pub const TENANT_REQUEST_RATE_DEFAULT: NonZeroU32 = NonZeroU32::new(200).expect("not zero");

/// For a person, or all customers of one tenant, in their browsers: more than anyone clicks.
const SESSION_RATE: NonZeroU32 = NonZeroU32::new(200).expect("not zero");
const SESSION_BURST: NonZeroU32 = NonZeroU32::new(1_000).expect("not zero");

/// Counted per process. A key can use one second's quota in a burst.
pub struct RequestRates {
    sessions: DefaultKeyedRateLimiter<String>,
    clock: DefaultClock,
    ours: DefaultKeyedRateLimiter<String>,
    tenants: DefaultKeyedRateLimiter<String>,
}

impl RequestRates {
    pub fn new(ours: NonZeroU32, tenants: NonZeroU32) -> Self {
        Self {
            sessions: RateLimiter::keyed(Quota::per_second(SESSION_RATE).allow_burst(SESSION_BURST)),
            clock: DefaultClock::default(),
            ours: RateLimiter::keyed(Quota::per_second(ours)),
            tenants: RateLimiter::keyed(Quota::per_second(tenants)),
        }
    }

    /// Takes one request of the key's quota, or returns how long to wait.
    pub(super) fn take(&self, key: &str, role: KeyRole) -> Result<(), Problem> {
        let rate = match role {
            KeyRole::Admin | KeyRole::Producer => &self.ours,
            KeyRole::Tenant => &self.tenants,
        };
        self.check(rate, key, "This key exceeded its rate limit in the last second.")
    }

    /// The same for a signed-in person, across all of their sessions.
    pub(super) fn take_for_session(&self, actor: &str) -> Result<(), Problem> {
        self.check(
            &self.sessions,
            actor,
            "Too many requests in the last second. Try again in a moment.",
        )
    }

    fn check(&self, rate: &DefaultKeyedRateLimiter<String>, who: &str, detail: &str) -> Result<(), Problem> {
        rate.check_key(&who.to_owned()).map_err(|early| {
            let wait = early.wait_time_from(self.clock.now());
            Problem::too_many(detail, wait)
        })
    }
}

impl Default for RequestRates {
    fn default() -> Self {
        Self::new(REQUEST_RATE_DEFAULT, TENANT_REQUEST_RATE_DEFAULT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_runs_wild_has_to_wait_and_others_do_not() {
        let rate = |n| NonZeroU32::new(n).expect("not zero");
        let rates = RequestRates::new(rate(5), rate(2));
        let taken = |key: &str, role| (0..20).filter(|_| rates.take(key, role).is_ok()).count();
        assert_eq!(taken("key:1", KeyRole::Tenant), 2);
        assert_eq!(taken("key:2", KeyRole::Tenant), 2);
        assert_eq!(taken("key:3", KeyRole::Producer), 5);
        assert_eq!(taken("key:admin", KeyRole::Admin), 5);
    }

    #[test]
    fn a_session_that_runs_wild_has_to_wait_and_others_do_not() {
        let rates = RequestRates::default();
        let taken = |actor: &str| {
            (0..3_000)
                .filter(|_| rates.take_for_session(actor).is_ok())
                .count()
        };
        assert!((1_000..1_500).contains(&taken("portal:acme")));
        assert!((1_000..1_500).contains(&taken("portal:globex")));
        assert!(rates.take("portal:acme", KeyRole::Tenant).is_ok());
    }
}
