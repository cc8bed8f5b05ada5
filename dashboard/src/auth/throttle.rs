//! How often somebody may try to sign in: for each login, and for each address that asks.
//! Invariant: what is remembered is bounded, whatever logins and addresses are tried: they fall into a fixed number of
//! buckets, by a salted hash that nobody outside can aim at.

use std::{
    net::{IpAddr, Ipv6Addr},
    num::NonZeroU32,
    sync::LazyLock,
    time::Duration,
};

use governor::{
    DefaultKeyedRateLimiter, Quota, RateLimiter,
    clock::{Clock, DefaultClock},
};
use sha2::{Digest, Sha256};

/// A person mistypes a few times. After that a guess each ten seconds is left to whoever tries: 8,640 a day.
const TRIES_PER_LOGIN: NonZeroU32 = NonZeroU32::new(10).expect("not zero");
const LOGIN_PAUSE: Duration = Duration::from_secs(10);
/// A whole office may be behind one address.
const TRIES_PER_ADDRESS: NonZeroU32 = NonZeroU32::new(30).expect("not zero");
const ADDRESS_PAUSE: Duration = Duration::from_secs(1);

/// Of this process: sessions are shared by all, tries are counted by each.
static DOOR: LazyLock<Throttle> = LazyLock::new(Throttle::new);

pub(super) struct Throttle {
    salt: [u8; 32],
    clock: DefaultClock,
    logins: DefaultKeyedRateLimiter<u16>,
    addresses: DefaultKeyedRateLimiter<u16>,
}

/// Takes one try, or says how long to wait for the next.
pub(super) fn take(login: &str, address: Option<IpAddr>) -> Result<(), Duration> {
    DOOR.take(login, address)
}

impl Throttle {
    fn new() -> Self {
        let quota = |tries: NonZeroU32, pause: Duration| {
            Quota::with_period(pause)
                .unwrap_or(Quota::per_second(NonZeroU32::MIN))
                .allow_burst(tries)
        };
        Self {
            salt: rand::random(),
            clock: DefaultClock::default(),
            logins: RateLimiter::keyed(quota(TRIES_PER_LOGIN, LOGIN_PAUSE)),
            addresses: RateLimiter::keyed(quota(TRIES_PER_ADDRESS, ADDRESS_PAUSE)),
        }
    }

    fn take(&self, login: &str, address: Option<IpAddr>) -> Result<(), Duration> {
        if let Some(address) = address {
            let bucket = self.bucket(&network(address).octets());
            self.addresses
                .check_key(&bucket)
                .map_err(|early| early.wait_time_from(self.clock.now()))?;
        }
        // As Postgres compares logins: byte by byte.
        self.logins
            .check_key(&self.bucket(login.as_bytes()))
            .map_err(|early| early.wait_time_from(self.clock.now()))
    }

    fn bucket(&self, value: &[u8]) -> u16 {
        let hash = Sha256::new()
            .chain_update(self.salt)
            .chain_update(value)
            .finalize();
        u16::from_be_bytes([hash[0], hash[1]])
    }
}

/// What one customer of a provider has: a whole IPv4 address, or the first half of an IPv6 one.
fn network(address: IpAddr) -> Ipv6Addr {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_is_tried_a_few_times_and_others_are_not_held_up() {
        let throttle = Throttle::new();
        let somewhere = |n: u8| Some(IpAddr::from([192, 0, 2, n]));
        for n in 0..10 {
            assert_eq!(throttle.take("ada", somewhere(n)), Ok(()), "try {n}");
        }
        let wait = throttle.take("ada", somewhere(99)).expect_err("too often");
        assert!(wait <= LOGIN_PAUSE && wait > Duration::from_secs(5), "{wait:?}");
        assert_eq!(throttle.take("grace", somewhere(1)), Ok(()));
    }

    #[test]
    fn an_address_that_tries_many_logins_has_to_wait() {
        let throttle = Throttle::new();
        let here = Some(IpAddr::from([192, 0, 2, 7]));
        let taken = (0..100)
            .filter(|n| throttle.take(&format!("login {n}"), here).is_ok())
            .count();
        assert!((30..33).contains(&taken), "{taken}");
        assert_eq!(throttle.take("ada", None), Ok(()));
    }

    #[test]
    fn an_ipv6_network_is_one_address() {
        let of = |text: &str| network(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
    }
}
