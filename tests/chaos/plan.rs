//! What will be done to whom and when: made from a seed alone, and printed, so that a run can be repeated.

use std::{fmt, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng};

pub(crate) const DISPATCHERS: usize = 3;
pub(crate) const APIS: usize = 2;
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
    RotateSecret(usize),
    Pause(usize, Duration),
    Replay,
    /// Much of what an endpoint was sent, or what it has not got, goes again; taken back after this, if so planned.
    ReplayMany(usize, Again, Option<Duration>),
    /// Makes an endpoint, and deletes it after this.
    PassingEndpoint(Duration),
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
            Self::RotateSecret(_) => "rotate",
            Self::Pause(..) => "pause",
            Self::Replay => "replay",
            Self::ReplayMany(..) => "replay many",
            Self::PassingEndpoint(_) => "passing endpoint",
            Self::Quiet(_) => "quiet",
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

    /// Faults for this long, a quarter of it quiet. `endpoints` is how many there are from the start.
    pub(crate) fn make(seed: u64, length: Duration, endpoints: usize) -> Self {
        let mut dice = Dice(StdRng::seed_from_u64(seed));
        let mut faults = Vec::new();
        let mut at = QUIET_START;
        let (mut quiet, mut last_full) = (Duration::ZERO, Duration::ZERO);
        while at < length {
            if quiet < at / 4 {
                let pause = dice.millis(1_000, 3_000);
                faults.push((at, Fault::Quiet(pause)));
                quiet += pause;
                at += pause;
                continue;
            }
            let fault = dice.fault(endpoints);
            // The disk is not always full: recovery after it takes the longest.
            let full = matches!(fault, Fault::FillDisk(_));
            if full && at < last_full + Duration::from_secs(20) {
                continue;
            }
            if full {
                last_full = at;
            }
            faults.push((at, fault));
            at += dice.millis(100, 1_400);
        }
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
    fn millis(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(self.0.random_range(least..most))
    }

    fn process(&mut self) -> Target {
        if self.0.random_bool(0.7) {
            Target::Dispatcher(self.0.random_range(0..DISPATCHERS))
        } else {
            Target::Api(self.0.random_range(0..APIS))
        }
    }

    fn connections(&mut self) -> Target {
        if self.0.random_bool(0.2) {
            Target::Producers
        } else {
            self.process()
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
            81..86 => Fault::RotateSecret(endpoint),
            86..90 => Fault::Pause(endpoint, self.millis(200, 2_500)),
            90..93 => Fault::Replay,
            93..97 => self.replay_many(endpoint),
            _ => Fault::PassingEndpoint(self.millis(1_000, 8_000)),
        }
    }
}
