//! What will be done to whom and when: made from a seed alone, and printed, so that a run can be repeated.

use std::{fmt, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::bad_tenants::Bad;

pub(crate) const DISPATCHERS: usize = 3;
pub(crate) const APIS: usize = 2;
/// One more API of a whole installation, behind PgBouncer; its proxy stands between PgBouncer and the server.
pub(crate) const POOLED_API: usize = APIS;
/// Dispatchers that come and go beside those.
pub(crate) const GUESTS: usize = 2;
/// Types of which each endpoint that comes and goes asks for one, so that it gets few events.
pub(crate) const VISITED: [&str; 16] = [
    "visit.a", "visit.b", "visit.c", "visit.d", "visit.e", "visit.f", "visit.g", "visit.h", "visit.i",
    "visit.j", "visit.k", "visit.l", "visit.m", "visit.n", "visit.o", "visit.p",
];
/// The installation is left alone, while tenants are not: the others' latency is measured.
const CALM_FIRST: Duration = Duration::from_secs(12);
const CALM: Duration = Duration::from_secs(35);
/// Everything happens.
const STORM: Duration = Duration::from_secs(40);
/// Bad tenants of one calm stretch.
const BAD_AT_ONCE: usize = 2;
/// They stay for a while when it is over.
const BAD_OVERSTAYS: Duration = Duration::from_secs(5);
/// Before the first fault.
const QUIET_START: Duration = Duration::from_secs(2);

/// One of the processes, each behind a proxy of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Dispatcher(usize),
    Api(usize),
    /// The producers' own connections.
    Producers,
}

/// Who makes a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Made {
    ByUs,
    ByThem,
}

/// How a dispatcher that came goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Term,
    Kill,
}

/// What a bulk replay is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    /// Of so long before.
    Delivered(Duration),
    NotArrived,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Fault {
    /// kill -9, and started again after this.
    Kill(Target, Duration),
    /// SIGSTOP, and SIGCONT after this.
    Sleep(Target, Duration),
    /// SIGTERM, and started again.
    Restart(Target),
    /// `pg_ctl restart -m immediate`
    CrashDatabase,
    Sever(Target),
    Freeze(Target, Duration),
    /// The connections there are never answer again.
    Silence(Target),
    LoseReplies(Target, Duration),
    /// Every session of ours is ended by the server.
    TerminateSessions,
    FillDisk(Duration),
    /// A transaction that holds its snapshot.
    LongTransaction(Duration),
    Hang(usize, Duration),
    Fail(usize, Duration),
    Reset(usize, Duration),
    ReceiversAway(Duration),
    /// A few shards lose their owner, who is not asked.
    MoveShards,
    /// The table says that every lease is over, which is not so.
    ExpireLeases,
    /// With a secret of ours, or one that is made for us.
    RotateSecret(usize, Made),
    Pause(usize, Duration),
    Replay,
    /// Much of what an endpoint was sent, or what it has not got, goes again; taken back after this, if so planned.
    ReplayMany(usize, Again, Option<Duration>),
    /// Makes an endpoint, and deletes it after this.
    PassingEndpoint(Duration),
    /// Makes an endpoint for one of the rare types and emits its first event; deletes it after this, if so planned.
    Visit(usize, Option<Duration>),
    /// One more dispatcher for this long.
    Guest(usize, Duration, Ending),
    /// A tenant that takes all it can get.
    Misbehave(Bad, Duration),
    /// Nothing: the system gets its breath back.
    Quiet(Duration),
}

impl Fault {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Kill(..) => "kill",
            Self::Sleep(..) => "sleep",
            Self::Restart(_) => "restart",
            Self::CrashDatabase => "crash database",
            Self::Sever(_) => "sever",
            Self::Freeze(..) => "freeze",
            Self::Silence(_) => "silence",
            Self::LoseReplies(..) => "lose replies",
            Self::TerminateSessions => "terminate sessions",
            Self::FillDisk(_) => "fill disk",
            Self::LongTransaction(_) => "long transaction",
            Self::Hang(..) => "hang",
            Self::Fail(..) => "fail",
            Self::Reset(..) => "reset",
            Self::ReceiversAway(_) => "receivers away",
            Self::MoveShards => "move shards",
            Self::ExpireLeases => "expire leases",
            Self::RotateSecret(..) => "rotate",
            Self::Pause(..) => "pause",
            Self::Replay => "replay",
            Self::ReplayMany(..) => "replay many",
            Self::PassingEndpoint(_) => "passing endpoint",
            Self::Visit(..) => "visit",
            Self::Guest(..) => "guest dispatcher",
            Self::Misbehave(..) => "bad tenant",
            Self::Quiet(_) => "quiet",
        }
    }

    /// Done to the installation or to everybody's receivers: what every tenant may feel.
    pub(crate) fn disturbs(&self) -> bool {
        match self {
            Self::Kill(..)
            | Self::Sleep(..)
            | Self::Restart(_)
            | Self::CrashDatabase
            | Self::Sever(_)
            | Self::Freeze(..)
            | Self::Silence(_)
            | Self::LoseReplies(..)
            | Self::TerminateSessions
            | Self::FillDisk(_)
            | Self::ReceiversAway(_)
            | Self::MoveShards
            | Self::ExpireLeases
            | Self::Guest(..) => true,
            Self::LongTransaction(_)
            | Self::Hang(..)
            | Self::Fail(..)
            | Self::Reset(..)
            | Self::RotateSecret(..)
            | Self::Pause(..)
            | Self::Replay
            | Self::ReplayMany(..)
            | Self::PassingEndpoint(_)
            | Self::Visit(..)
            | Self::Misbehave(..)
            | Self::Quiet(_) => false,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) faults: Vec<(Duration, Fault)>,
}

impl Plan {
    pub(crate) fn none(seed: u64) -> Self {
        let faults = Vec::new();
        Self { seed, faults }
    }

    /// Stretches of calm and of storm in turn, for this long. `endpoints` is how many there are from the start, `kinds` are
    /// the bad tenants to choose from.
    pub(crate) fn make(seed: u64, length: Duration, endpoints: usize, kinds: &[Bad]) -> Self {
        let mut dice = Dice(StdRng::seed_from_u64(seed));
        let mut faults = Vec::new();
        let mut bad = Vec::new();
        let (mut from, mut calm) = (QUIET_START, true);
        while from < length {
            let whole = match (calm, from == QUIET_START) {
                (true, true) => CALM_FIRST,
                (true, false) => CALM,
                (false, _) => STORM,
            };
            let to = (from + whole).min(length);
            if calm {
                for _ in 0..BAD_AT_ONCE.min(kinds.len()) {
                    if bad.is_empty() {
                        bad = dice.shuffled(kinds);
                    }
                    let lasts = to - from + BAD_OVERSTAYS;
                    faults.extend(bad.pop().map(|bad| (from, Fault::Misbehave(bad, lasts))));
                }
                dice.calm(from, to, endpoints, &mut faults);
            } else {
                dice.storm(from, to, endpoints, &mut faults);
                dice.guests(from, to, &mut faults);
            }
            dice.visits(from, to, length, &mut faults);
            (from, calm) = (to, !calm);
        }
        // In order of time; what is at the same time stays in the order it was made in.
        faults.sort_by_key(|(at, _)| *at);
        Self { seed, faults }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the plan of seed {}:", self.seed)?;
        for (at, fault) in &self.faults {
            writeln!(f, "  {:7.2} s  {fault:?}", at.as_secs_f64())?;
        }
        Ok(())
    }
}

struct Dice(StdRng);

impl Dice {
    /// Each once, in some order.
    fn shuffled(&mut self, kinds: &[Bad]) -> Vec<Bad> {
        let mut kinds = kinds.to_vec();
        for last in (1..kinds.len()).rev() {
            kinds.swap(last, self.0.random_range(0..=last));
        }
        kinds
    }

    /// A quarter of it quiet.
    fn storm(&mut self, from: Duration, to: Duration, endpoints: usize, faults: &mut Vec<(Duration, Fault)>) {
        let mut at = from;
        let (mut quiet, mut last_full) = (Duration::ZERO, None);
        while at < to {
            if quiet < (at - from) / 4 {
                let pause = self.millis(1_000, 3_000);
                faults.push((at, Fault::Quiet(pause)));
                quiet += pause;
                at += pause;
                continue;
            }
            let fault = self.fault(endpoints);
            // The disk is not always full: recovery after it takes the longest.
            let full = matches!(fault, Fault::FillDisk(_));
            if full && last_full.is_some_and(|last| at < last + Duration::from_secs(20)) {
                continue;
            }
            if full {
                last_full = Some(at);
            }
            faults.push((at, fault));
            at += self.millis(100, 1_400);
        }
    }

    fn calm(&mut self, from: Duration, to: Duration, endpoints: usize, faults: &mut Vec<(Duration, Fault)>) {
        let mut at = from;
        while at < to {
            let fault = self.fault(endpoints);
            if !fault.disturbs() {
                faults.push((at, fault));
                at += self.millis(300, 2_000);
            }
        }
    }

    /// Endpoints that come and go all the time.
    fn visits(
        &mut self,
        from: Duration,
        to: Duration,
        length: Duration,
        faults: &mut Vec<(Duration, Fault)>,
    ) {
        let mut at = from;
        while at < to {
            let gone = self.0.random_bool(0.7).then(|| self.millis(1_000, 15_000));
            let gone = gone.filter(|gone| at + *gone < length);
            faults.push((at, Fault::Visit(self.0.random_range(0..VISITED.len()), gone)));
            at += self.millis(300, 1_500);
        }
    }

    /// Dispatchers that come and go every few seconds.
    fn guests(&mut self, from: Duration, to: Duration, faults: &mut Vec<(Duration, Fault)>) {
        let mut at = from;
        while at < to {
            let guest = self.0.random_range(0..GUESTS);
            let ending = if self.0.random_bool(0.6) {
                Ending::Term
            } else {
                Ending::Kill
            };
            faults.push((at, Fault::Guest(guest, self.millis(1_500, 6_000), ending)));
            at += self.millis(2_000, 5_000);
        }
    }

    fn millis(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(self.0.random_range(least..most))
    }

    fn process(&mut self) -> Target {
        if self.0.random_bool(0.7) {
            Target::Dispatcher(self.0.random_range(0..DISPATCHERS))
        } else {
            Target::Api(self.0.random_range(0..=POOLED_API))
        }
    }

    fn connections(&mut self) -> Target {
        match self.0.random_range(0..10) {
            0..2 => Target::Producers,
            2..4 => Target::Api(POOLED_API),
            _ => self.process(),
        }
    }

    fn replay_many(&mut self, endpoint: usize) -> Fault {
        let again = if self.0.random_bool(0.5) {
            Again::Delivered(self.millis(500, 5_000))
        } else {
            Again::NotArrived
        };
        let cancelled = self.0.random_bool(0.3).then(|| self.millis(50, 1_500));
        Fault::ReplayMany(endpoint, again, cancelled)
    }

    fn fault(&mut self, endpoints: usize) -> Fault {
        let endpoint = self.0.random_range(0..endpoints);
        match self.0.random_range(0..100) {
            0..14 => Fault::Kill(self.process(), self.millis(50, 3_000)),
            14..24 => Fault::Sleep(self.process(), self.millis(300, 9_000)),
            24..29 => Fault::Restart(self.process()),
            29..33 => Fault::CrashDatabase,
            33..37 => Fault::Sever(self.connections()),
            37..41 => Fault::Silence(self.connections()),
            41..46 => Fault::Freeze(self.connections(), self.millis(300, 9_000)),
            46..52 => Fault::LoseReplies(self.connections(), self.millis(50, 3_000)),
            52..56 => Fault::TerminateSessions,
            56..58 => Fault::FillDisk(self.millis(500, 3_000)),
            58..60 => Fault::LongTransaction(self.millis(1_000, 8_000)),
            60..65 => Fault::Hang(endpoint, self.millis(500, 6_000)),
            65..69 => Fault::Fail(endpoint, self.millis(500, 5_000)),
            69..73 => Fault::Reset(endpoint, self.millis(200, 4_000)),
            73..76 => Fault::ReceiversAway(self.millis(200, 2_500)),
            76..79 => Fault::MoveShards,
            79..81 => Fault::ExpireLeases,
            81..86 => {
                let made = if self.0.random_bool(0.5) {
                    Made::ByUs
                } else {
                    Made::ByThem
                };
                Fault::RotateSecret(endpoint, made)
            }
            86..90 => Fault::Pause(endpoint, self.millis(200, 2_500)),
            90..93 => Fault::Replay,
            93..97 => self.replay_many(endpoint),
            _ => Fault::PassingEndpoint(self.millis(1_000, 8_000)),
        }
    }
}
