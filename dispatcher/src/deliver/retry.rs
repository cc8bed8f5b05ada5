//! When to try again. Pure: randomness is passed in, and delays are durations, not points in time.

use std::{str::FromStr, time::Duration};

use postrider_proto::{
    DeadReason, Outcome, OutcomeKind,
    limits::{ATTEMPTS_PER_DELIVERY_MAX, RETRY_AFTER_SECONDS_MAX, SCHEDULE_STEPS_MAX},
};
use rand::{Rng, RngExt};

const WAIT_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// After a fault of the egress proxy, of the first attempts and of those that follow: weeks until none is left.
const PROXY_WAIT: Duration = Duration::from_secs(120);
const PROXY_WAIT_LATER: Duration = Duration::from_secs(60 * 60);
const PROXY_SOON_MAX: u16 = 100;

/// The wait before each attempt, counted from the one before. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule(Vec<Duration>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    #[error("`{0}` is not a valid delay: use a number with ms, s, m, h or d, at most 30d")]
    NotAWait(String),
    #[error("a schedule must have 1 to {SCHEDULE_STEPS_MAX} delays")]
    Length,
}

impl Schedule {
    pub fn new(waits: Vec<Duration>) -> Result<Self, ScheduleError> {
        if waits.is_empty() || waits.len() > SCHEDULE_STEPS_MAX {
            return Err(ScheduleError::Length);
        }
        match waits.iter().find(|wait| **wait > WAIT_MAX) {
            Some(wait) => Err(ScheduleError::NotAWait(format!("{wait:?}"))),
            None => Ok(Self(waits)),
        }
    }

    pub fn waits(&self) -> &[Duration] {
        &self.0
    }

    /// The wait before the attempt at this step; none when the schedule is exhausted.
    pub fn wait(&self, step: u16) -> Option<Duration> {
        self.0.get(usize::from(step)).copied()
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Self(
            [0, 60, 300, 1_800, 7_200, 36_000, 86_400]
                .map(Duration::from_secs)
                .to_vec(),
        )
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    /// `0s,1m,5m`
    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        Self::new(text.split(',').map(parse_wait).collect::<Result<_, _>>()?)
    }
}

/// A number and its unit: `250ms`, `10s`, `1m`, `2h`, `30d`.
pub fn parse_wait(text: &str) -> Result<Duration, ScheduleError> {
    let text = text.trim();
    let wrong = || ScheduleError::NotAWait(text.to_owned());
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let unit_ms: u64 = match &text[digits..] {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    let wait = Duration::from_millis(number.checked_mul(unit_ms).ok_or_else(wrong)?);
    if wait > WAIT_MAX { Err(wrong()) } else { Ok(wait) }
}

/// Stretches each wait by a random factor in `[1, 1 + jitter]`, so that what failed together does not return together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Jitter(f64);

impl Jitter {
    /// Between 0 and 1.
    pub fn new(fraction: f64) -> Option<Self> {
        (0.0..=1.0).contains(&fraction).then_some(Self(fraction))
    }

    pub fn stretch(self, wait: Duration, rng: &mut impl Rng) -> Duration {
        if self.0 == 0.0 {
            return wait;
        }
        wait.mul_f64(1.0 + self.0 * rng.random::<f64>())
    }
}

impl Default for Jitter {
    fn default() -> Self {
        Self(0.2)
    }
}

/// What becomes of a delivery after an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Delivered,
    Dead(DeadReason),
    /// Rejected by the endpoint's filter: dropped, and only counted.
    Filtered,
    /// Attempt the given step of the schedule after this wait.
    Retry {
        step: u16,
        wait: Duration,
    },
}

/// `step` is the position of the attempt that just ended, `number` counts all attempts of the delivery.
pub fn decide(
    outcome: &Outcome,
    step: u16,
    number: u16,
    schedule: &Schedule,
    jitter: Jitter,
    rng: &mut impl Rng,
) -> Next {
    match by_schedule(outcome, step, number, schedule, jitter, rng) {
        Next::Retry { .. } if number >= ATTEMPTS_PER_DELIVERY_MAX => Next::Dead(DeadReason::Exhausted),
        next => next,
    }
}

fn by_schedule(
    outcome: &Outcome,
    step: u16,
    number: u16,
    schedule: &Schedule,
    jitter: Jitter,
    rng: &mut impl Rng,
) -> Next {
    let retry_after = match outcome {
        // The endpoint was never reached, so this does not consume a step of its schedule.
        Outcome::Unreachable {
            kind: OutcomeKind::ProxyFailed,
            ..
        } => {
            let wait = match number {
                ..=PROXY_SOON_MAX => PROXY_WAIT,
                _ => PROXY_WAIT_LATER,
            };
            return Next::Retry {
                step,
                wait: jitter.stretch(wait, rng),
            };
        }
        Outcome::Accepted { .. } => return Next::Delivered,
        Outcome::Forbidden { .. } => return Next::Dead(DeadReason::RefusedAddress),
        Outcome::NotSent { .. } => return Next::Dead(DeadReason::TooOld),
        Outcome::Refused { status: 410, .. } => return Next::Dead(DeadReason::Gone),
        Outcome::Refused {
            status: 429 | 503,
            retry_after: Some(asked),
            ..
        } => (*asked).min(Duration::from_secs(RETRY_AFTER_SECONDS_MAX)),
        Outcome::Refused { .. } | Outcome::Unreachable { .. } => Duration::ZERO,
    };
    let step = step.saturating_add(1);
    match schedule.wait(step) {
        // `Retry-After` only postpones: the schedule's own wait is the least.
        Some(wait) => Next::Retry {
            step,
            wait: jitter.stretch(wait, rng).max(retry_after),
        },
        None => Next::Dead(DeadReason::Exhausted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_proto::Response;
    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::StdRng};

    fn refused(status: u16, retry_after: Option<u64>) -> Outcome {
        Outcome::Refused {
            status,
            retry_after: retry_after.map(Duration::from_secs),
            response: Response::default(),
        }
    }

    fn decide_plain(outcome: &Outcome, step: u16) -> Next {
        let mut rng = StdRng::seed_from_u64(1);
        decide(
            outcome,
            step,
            step + 1,
            &Schedule::default(),
            Jitter(0.0),
            &mut rng,
        )
    }

    #[test]
    fn the_default_schedule_has_seven_attempts() {
        let waits: Schedule = "0s,1m,5m,30m,2h,10h,24h".parse().expect("a schedule");
        assert_eq!(waits, Schedule::default());
        for step in 0..6 {
            assert!(
                matches!(decide_plain(&refused(500, None), step), Next::Retry { step: next, .. } if next == step + 1)
            );
        }
        assert_eq!(
            decide_plain(&refused(500, None), 6),
            Next::Dead(DeadReason::Exhausted)
        );
    }

    #[test]
    fn a_gone_endpoint_and_a_forbidden_address_are_never_retried() {
        assert_eq!(decide_plain(&refused(410, None), 0), Next::Dead(DeadReason::Gone));
        let forbidden = Outcome::Forbidden { error: String::new() };
        assert_eq!(
            decide_plain(&forbidden, 0),
            Next::Dead(DeadReason::RefusedAddress)
        );
    }

    #[test]
    fn a_fault_of_the_egress_proxy_uses_up_no_try() {
        let fault = Outcome::Unreachable {
            kind: OutcomeKind::ProxyFailed,
            error: String::new(),
        };
        for step in [0, 6] {
            let wait = PROXY_WAIT;
            assert_eq!(decide_plain(&fault, step), Next::Retry { step, wait });
        }
    }

    #[test]
    fn no_delivery_has_more_attempts_than_are_allowed() {
        let fault = Outcome::Unreachable {
            kind: OutcomeKind::ProxyFailed,
            error: String::new(),
        };
        let mut rng = StdRng::seed_from_u64(1);
        let mut decide = |outcome: &Outcome, number| {
            decide(outcome, 0, number, &Schedule::default(), Jitter(0.0), &mut rng)
        };
        let mut waited = Duration::ZERO;
        for number in 1..ATTEMPTS_PER_DELIVERY_MAX {
            match decide(&fault, number) {
                Next::Retry { step: 0, wait } => waited += wait,
                other => panic!("attempt {number}: {other:?}"),
            }
        }
        assert!(waited > Duration::from_secs(30 * 24 * 60 * 60), "{waited:?}");
        for number in [ATTEMPTS_PER_DELIVERY_MAX, u16::MAX] {
            for outcome in [&fault, &refused(500, None)] {
                assert_eq!(decide(outcome, number), Next::Dead(DeadReason::Exhausted));
            }
            let accepted = Outcome::Accepted {
                status: 204,
                response: Response::default(),
            };
            assert_eq!(decide(&accepted, number), Next::Delivered);
        }
    }

    #[test]
    fn retry_after_only_postpones_and_only_on_429_and_503() {
        let minute = Duration::from_secs(60);
        for (status, asked, wait) in [
            (429, 3_600, Duration::from_secs(3_600)),
            (503, 3_600, Duration::from_secs(3_600)),
            (500, 3_600, minute),
            (429, 1, minute),
            (429, u64::MAX, Duration::from_secs(RETRY_AFTER_SECONDS_MAX)),
        ] {
            assert_eq!(
                decide_plain(&refused(status, Some(asked)), 0),
                Next::Retry { step: 1, wait },
                "{status} {asked}"
            );
        }
    }

    #[test]
    fn waits_are_read_or_refused_by_name() {
        assert_eq!(parse_wait("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_wait(" 30d "), Ok(WAIT_MAX));
        for bad in [
            "",
            "5",
            "s",
            "-1s",
            "1.5s",
            "31d",
            "1w",
            "99999999999999999999s",
            "1 s",
        ] {
            assert!(parse_wait(bad).is_err(), "{bad}");
        }
        assert_eq!(
            "".parse::<Schedule>(),
            Err(ScheduleError::NotAWait(String::new()))
        );
        assert_eq!(
            ["1s"; 51].join(",").parse::<Schedule>(),
            Err(ScheduleError::Length)
        );
    }

    proptest! {
        #[test]
        fn a_retry_is_never_early_and_never_beyond_the_jitter(
            waits in proptest::collection::vec(0_u64..86_400_000, 1..20),
            step in 0_u16..30,
            share in 0.0_f64..=1.0,
            retry_after in proptest::option::of(any::<u32>()),
            seed: u64,
        ) {
            let schedule = Schedule::new(waits.into_iter().map(Duration::from_millis).collect()).expect("in bounds");
            let jitter = Jitter::new(share).expect("in bounds");
            let asked = retry_after.map_or(Duration::ZERO, |s| Duration::from_secs(s.into()).min(Duration::from_secs(RETRY_AFTER_SECONDS_MAX)));
            let mut rng = StdRng::seed_from_u64(seed);
            match decide(&refused(503, retry_after.map(u64::from)), step, step + 1, &schedule, jitter, &mut rng) {
                Next::Retry { step: next, wait } => {
                    let base = schedule.wait(next).expect("a step of the schedule");
                    prop_assert_eq!(next, step + 1);
                    prop_assert!(wait >= base.max(asked));
                    prop_assert!(wait <= base.mul_f64(1.0 + share + 1e-9).max(asked));
                }
                Next::Dead(reason) => {
                    prop_assert_eq!(reason, DeadReason::Exhausted);
                    prop_assert!(schedule.wait(step + 1).is_none());
                }
                Next::Delivered | Next::Filtered => prop_assert!(false, "a refusal is not a success"),
            }
        }

        #[test]
        fn any_schedule_text_is_read_without_a_panic(text: String) {
            let _ = text.parse::<Schedule>();
        }
    }

    #[test]
    fn no_answer_is_retried() {
        let outcome = Outcome::Unreachable {
            kind: OutcomeKind::TimedOut,
            error: String::new(),
        };
        assert!(matches!(decide_plain(&outcome, 0), Next::Retry { step: 1, .. }));
    }
}
