//! Limits failed sign-ins per login and address, so that strangers can't lock out a login's owner.
//! Invariants: only failures count. Memory is bounded whatever logins and addresses are tried: they fall into a fixed
//! number of buckets by a salted hash that an attacker can't predict.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sha2::{Digest, Sha256};

use super::address::network;

/// People mistype a few times. After that one guess per ten seconds remains: 8,640 a day.
const FAILURES_MAX: u32 = 10;
const PAUSE: Duration = Duration::from_secs(10);

/// Per process: sessions are shared by all processes, failures are counted by each.
static THROTTLE: LazyLock<Throttle> = LazyLock::new(Throttle::new);

struct Throttle {
    salt: [u8; 32],
    /// When a bucket's failures expire, each `PAUSE` after the one before.
    forgotten: Mutex<HashMap<u16, Instant>>,
}

/// An attempt counts as a failure until proven otherwise, so that concurrent attempts can't all slip through.
pub(super) struct Guess {
    throttle: &'static Throttle,
    bucket: u16,
}

/// Starts one attempt, or returns how long to wait.
pub(super) fn begin(login: &str, address: Option<IpAddr>) -> Result<Guess, Duration> {
    let bucket = THROTTLE.bucket(login, address);
    THROTTLE.take(bucket, Instant::now())?;
    Ok(Guess {
        throttle: &THROTTLE,
        bucket,
    })
}

impl Guess {
    /// The password was correct: earlier failures are cleared.
    pub(super) fn succeeded(self) {
        self.throttle.lock().remove(&self.bucket);
    }

    /// The password was never checked.
    pub(super) fn not_checked(self) {
        self.throttle.give_back(self.bucket);
    }
}

impl Throttle {
    fn new() -> Self {
        Self {
            salt: rand::random(),
            forgotten: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u16, Instant>> {
        self.forgotten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, bucket: u16, now: Instant) -> Result<(), Duration> {
        let mut forgotten = self.lock();
        let kept = forgotten.entry(bucket).or_insert(now);
        let from = (*kept).max(now);
        let allowed = now + PAUSE * (FAILURES_MAX - 1);
        if from > allowed {
            return Err(from - allowed);
        }
        *kept = from + PAUSE;
        Ok(())
    }

    fn give_back(&self, bucket: u16) {
        if let Some(kept) = self.lock().get_mut(&bucket) {
            *kept -= PAUSE;
        }
    }

    /// Compared byte by byte, as Postgres compares logins.
    fn bucket(&self, login: &str, address: Option<IpAddr>) -> u16 {
        let address = address.map(|address| network(address).octets());
        let hash = Sha256::new()
            .chain_update(self.salt)
            .chain_update(address.unwrap_or_default())
            .chain_update(login.as_bytes())
            .finalize();
        u16::from_be_bytes([hash[0], hash[1]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_is_tried_a_few_times_from_one_address_and_others_are_not_held_up() {
        let (throttle, now) = (Throttle::new(), Instant::now());
        let from = |login: &str, n: u8| throttle.bucket(login, Some(IpAddr::from([192, 0, 2, n])));
        for n in 0..10 {
            assert_eq!(throttle.take(from("ada", 1), now), Ok(()), "try {n}");
        }
        let wait = throttle.take(from("ada", 1), now).expect_err("too often");
        assert_eq!(wait, PAUSE);
        assert_eq!(throttle.take(from("ada", 2), now), Ok(()), "from elsewhere");
        assert_eq!(throttle.take(from("grace", 1), now), Ok(()), "another login");
        assert_eq!(throttle.take(from("ada", 1), now + wait), Ok(()));
        assert!(throttle.take(from("ada", 1), now + wait).is_err());
    }

    #[test]
    fn what_was_no_failure_does_not_count() {
        let (throttle, now) = (Throttle::new(), Instant::now());
        let bucket = throttle.bucket("ada", None);
        for _ in 0..100 {
            assert_eq!(throttle.take(bucket, now), Ok(()));
            throttle.give_back(bucket);
        }
        assert_eq!(throttle.take(bucket, now), Ok(()));
    }
}
