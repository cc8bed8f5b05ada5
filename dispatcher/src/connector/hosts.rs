//! Which of several hosts is used: shared by all connectors of one URL.
//!
//! Invariants: one search at a time, whatever the number of connections that are wanted; a search ends in a bounded time,
//! however many hosts drop packets; a host that was left is not returned to while it is on an older timeline than the one
//! that it was left for. That one is a primary which does not know yet that another was promoted.

use std::{
    cmp::Reverse,
    io::{Error as IoError, ErrorKind},
    sync::Mutex,
    time::{Duration, Instant},
};

use sqlx::{Connection, PgConnection, PgPool, postgres::PgConnectOptions};
use tokio::{
    sync::Mutex as AsyncMutex,
    task::JoinSet,
    time::{Instant as TokioInstant, timeout_at},
};

use super::{Access, facts::Facts, url::Wanted};
use crate::{db_timeout::within, health::database::is_outage, lock::lock};

/// For one host: to connect and to say what it is.
pub(super) const HOST_TIME_MAX: Duration = Duration::from_secs(2);
/// After the first host that fits, how long a search waits for a better one.
const SETTLE: Duration = Duration::from_millis(200);
/// A server that responds later may have been frozen: meanwhile another may have been promoted.
const SLOW: Duration = Duration::from_secs(1);
/// An old primary is demoted long before. After this a lower timeline is a cluster that was restored.
const TIMELINE_KEPT: Duration = Duration::from_secs(300);

/// How well a host is what was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fit {
    Best,
    /// Another may be better.
    Second,
    None,
}

/// For a diagnosis.
pub(crate) struct HostState {
    pub(crate) found: String,
    pub(crate) responds: bool,
    pub(crate) accepts_writes: bool,
    /// Several proxies may lead to the same primary.
    pub(crate) is_one_of_several_ways: bool,
}

pub(super) struct Hosts {
    names: Vec<String>,
    pub(super) access: Access,
    wanted: Wanted,
    host_time_max: Duration,
    state: Mutex<State>,
    searching: AsyncMutex<()>,
}

#[derive(Default)]
struct State {
    /// None while it is not known which host to use.
    current: Option<usize>,
    /// The last one that was.
    last: Option<usize>,
    /// One that was found to be of no use although it fits: it comes last.
    refused: Option<usize>,
    /// When connections that existed then stopped being of use.
    left_at: Option<Instant>,
    /// Of the newest primary seen.
    timeline: Option<i32>,
    lost_at: Option<Instant>,
    pools: Vec<(PgPool, Vec<PgConnectOptions>)>,
    /// Whether somebody checks the current host all the time.
    is_watched: bool,
}

/// A host that fits, of which the least is chosen.
type Rank = (bool, Reverse<i32>, bool, usize);
type Found = (usize, PgConnection, Option<Facts>);
type Tried = (usize, Result<(PgConnection, Option<Facts>), sqlx::Error>);

impl Hosts {
    pub(super) fn new(names: Vec<String>, access: Access, wanted: Wanted, host_time_max: Duration) -> Self {
        Self {
            names,
            access,
            wanted,
            host_time_max,
            state: Mutex::default(),
            searching: AsyncMutex::default(),
        }
    }

    /// For one connection: to the host that was found last, and if that fails for a search, which may ask twice.
    pub(super) fn connect_time_max(&self) -> Duration {
        self.host_time_max * 3 + SETTLE * 2
    }

    pub(super) fn was_left_since(&self, age: Duration) -> bool {
        lock(&self.state).left_at.is_some_and(|at| at.elapsed() < age)
    }

    /// The first host stands for one that is not known yet: connections of pools are checked.
    pub(super) fn register(
        &self,
        pool: impl FnOnce(usize) -> PgPool,
        options: &[PgConnectOptions],
    ) -> PgPool {
        let mut state = lock(&self.state);
        let pool = pool(state.current.or(state.last).unwrap_or(0));
        state.pools.retain(|(pool, _)| !pool.is_closed());
        state.pools.push((pool.clone(), options.to_vec()));
        pool
    }

    pub(super) fn has_pools(&self) -> bool {
        let mut state = lock(&self.state);
        state.pools.retain(|(pool, _)| !pool.is_closed());
        !state.pools.is_empty()
    }

    /// False if it is already.
    pub(super) fn begin_to_watch(&self) -> bool {
        !std::mem::replace(&mut lock(&self.state).is_watched, true)
    }

    pub(super) fn end_watch(&self) {
        lock(&self.state).is_watched = false;
    }

    /// The current host accepts connections and is of no use: all of them are given up.
    pub(super) fn give_up(&self) {
        let mut state = lock(&self.state);
        let now = Instant::now();
        if let Some(current) = state.current.take() {
            state.refused = Some(current);
            state.lost_at.get_or_insert(now);
        }
        state.left_at = Some(now);
    }

    fn lose(&self, lost: usize) {
        let mut state = lock(&self.state);
        if state.current == Some(lost) {
            state.current = None;
            state.lost_at.get_or_insert(Instant::now());
        }
    }

    pub(super) async fn connect(&self, options: &[PgConnectOptions]) -> Result<PgConnection, sqlx::Error> {
        let current = lock(&self.state).current;
        if let Some(current) = current
            && let Some(connection) = self.connect_to(current, options).await
        {
            return Ok(connection);
        }
        let _one = self.searching.lock().await;
        // It may have been found while this one waited.
        let found = lock(&self.state).current;
        if let Some(found) = found
            && let Some(connection) = self.connect_to(found, options).await
        {
            return Ok(connection);
        }
        self.search(options).await
    }

    async fn connect_to(&self, host: usize, options: &[PgConnectOptions]) -> Option<PgConnection> {
        let began = Instant::now();
        let opened = open(options[host].clone(), self.wanted, self.host_time_max).await;
        let refusal = match opened {
            Ok(_) if began.elapsed() > SLOW => "slow".to_owned(),
            Ok((connection, facts)) => match self.refusal(facts) {
                // While it was opened, another may have taken its place.
                None if lock(&self.state).current == Some(host) => return Some(connection),
                None => return None,
                Some(refusal) => refusal,
            },
            Err(error) => error.to_string(),
        };
        tracing::debug!(
            host = self.names[host],
            error = refusal,
            "the host is not used any more"
        );
        self.lose(host);
        None
    }

    /// For a connection that was opened without this: an error unless it is to the right host.
    pub(super) async fn check(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        if self.wanted == Wanted::Any {
            return Ok(());
        }
        let facts = Facts::of(connection).await?;
        match self.refusal(Some(facts)) {
            None => Ok(()),
            Some(refusal) => Err(sqlx::Error::Io(IoError::new(ErrorKind::NotConnected, refusal))),
        }
    }

    /// Why a host that responded is not used.
    fn refusal(&self, facts: Option<Facts>) -> Option<String> {
        let facts = facts?;
        if !facts.fits(self.wanted) {
            return Some(facts.words().to_owned());
        }
        let state = lock(&self.state);
        let forgotten = state.lost_at.is_some_and(|at| at.elapsed() > TIMELINE_KEPT);
        match (facts.timeline, state.timeline) {
            (Some(its), Some(newest)) if its < newest && !forgotten => Some(format!(
                "an old primary, on timeline {its} while another is on {newest}"
            )),
            _ => None,
        }
    }

    /// Whether an open connection is still to the right host.
    pub(super) async fn examine_open(&self, connection: &mut PgConnection) -> Result<Fit, sqlx::Error> {
        if self.wanted == Wanted::Any {
            return connection.ping().await.map(|()| Fit::Best);
        }
        let facts = Facts::of(connection).await?;
        Ok(match self.refusal(Some(facts)) {
            Some(_) => Fit::None,
            None if facts.is_second_best(self.wanted) => Fit::Second,
            None => Fit::Best,
        })
    }

    /// Once more if a server was slow: those that responded before it may have changed.
    async fn search(&self, options: &[PgConnectOptions]) -> Result<PgConnection, sqlx::Error> {
        let began = Instant::now();
        let mut found = self.ask_once(options).await?;
        if began.elapsed() > SLOW {
            drop(found);
            found = self.ask_once(options).await?;
        }
        let (host, connection, facts) = found;
        self.choose(host, facts);
        Ok(connection)
    }

    /// Asks all hosts at once, so that one that drops packets costs no more than one that refuses.
    async fn ask_once(&self, options: &[PgConnectOptions]) -> Result<Found, sqlx::Error> {
        let mut asked = JoinSet::new();
        for (host, options) in options.iter().cloned().enumerate() {
            let (wanted, limit) = (self.wanted, self.host_time_max);
            asked.spawn(async move { (host, open(options, wanted, limit).await) });
        }
        let mut best: Option<(Rank, PgConnection, Option<Facts>)> = None;
        let mut others = Refusals::default();
        let mut until = TokioInstant::now() + self.host_time_max * 2;
        while let Ok(Some(joined)) = timeout_at(until, asked.join_next()).await {
            let Ok((host, tried)) = joined else { continue };
            match self.examine((host, tried), &mut others) {
                Some(found) if best.as_ref().is_none_or(|best| found.0 < best.0) => {
                    until = until.min(TokioInstant::now() + SETTLE);
                    best = Some(found);
                }
                _ => {}
            }
        }
        let Some(((.., host), connection, facts)) = best else {
            return Err(others.error(self.wanted));
        };
        Ok((host, connection, facts))
    }

    fn examine(
        &self,
        (host, tried): Tried,
        others: &mut Refusals,
    ) -> Option<(Rank, PgConnection, Option<Facts>)> {
        let name = &self.names[host];
        let (connection, facts) = match tried {
            Ok(opened) => opened,
            Err(error) => {
                others.failed(name, error);
                return None;
            }
        };
        if let Some(refusal) = self.refusal(facts) {
            others.refused(name, &refusal);
            return None;
        }
        let refused = lock(&self.state).refused == Some(host);
        let second_best = facts.is_some_and(|facts| facts.is_second_best(self.wanted));
        let timeline = facts.and_then(|facts| facts.timeline).unwrap_or(0);
        Some(((second_best, Reverse(timeline), refused, host), connection, facts))
    }

    fn choose(&self, host: usize, facts: Option<Facts>) {
        let mut state = lock(&self.state);
        let timeline = facts.and_then(|facts| facts.timeline);
        let moved = state.last.is_some_and(|last| last != host);
        let promoted = matches!((timeline, state.timeline), (Some(its), Some(before)) if its != before);
        if moved || promoted {
            state.left_at = Some(Instant::now());
        }
        if timeline.is_some() {
            state.timeline = timeline;
        }
        state.current = Some(host);
        state.last = Some(host);
        state.refused = state.refused.filter(|_| !moved);
        state.lost_at = None;
        for (pool, options) in &state.pools {
            pool.set_connect_options(options[host].clone());
        }
        if moved {
            tracing::info!(
                host = self.names[host],
                "connecting to another host of the database"
            );
        }
    }

    /// What each host says of itself, in order.
    pub(super) async fn ask_all(&self, options: &[PgConnectOptions]) -> Vec<HostState> {
        let mut asked = JoinSet::new();
        for (host, options) in options.iter().cloned().enumerate() {
            let limit = self.host_time_max;
            let facts = async move {
                let mut connection = PgConnection::connect_with(&options).await?;
                let facts = Facts::of(&mut connection).await?;
                connection.close().await?;
                Ok(facts)
            };
            asked.spawn(async move { (host, within(limit, facts).await) });
        }
        let mut answers = asked.join_all().await;
        answers.sort_by_key(|(host, _)| *host);
        let state = |(host, facts): (usize, Result<Facts, sqlx::Error>)| HostState {
            found: match &facts {
                Ok(facts) => format!("{} is {}", self.names[host], facts.words()),
                Err(error) => format!("{}: {error}", self.names[host]),
            },
            responds: facts.is_ok(),
            accepts_writes: facts.is_ok_and(|facts| facts.fits(Wanted::ReadWrite)),
            is_one_of_several_ways: self.wanted == Wanted::Any,
        };
        answers.into_iter().map(state).collect()
    }
}

async fn open(
    options: PgConnectOptions,
    wanted: Wanted,
    limit: Duration,
) -> Result<(PgConnection, Option<Facts>), sqlx::Error> {
    let opened = async {
        let mut connection = PgConnection::connect_with(&options).await?;
        let facts = match wanted {
            Wanted::Any => None,
            _ => Some(Facts::of(&mut connection).await?),
        };
        Ok((connection, facts))
    };
    within(limit, opened).await
}

/// Why no host was chosen.
#[derive(Default)]
struct Refusals {
    words: Vec<String>,
    has_responded: bool,
    /// Such as a wrong password, which waiting does not fix.
    rejected: Option<sqlx::Error>,
}

impl Refusals {
    fn failed(&mut self, name: &str, error: sqlx::Error) {
        self.words.push(format!("{name}: {error}"));
        if !is_outage(&error) {
            self.rejected.get_or_insert(error);
        }
    }

    fn refused(&mut self, name: &str, refusal: &str) {
        self.words.push(format!("{name}: {refusal}"));
        self.has_responded = true;
    }

    fn error(self, wanted: Wanted) -> sqlx::Error {
        match self.rejected {
            Some(error) if !self.has_responded => error,
            _ => {
                let words = format!("no host is {wanted}: {}", self.words.join("; "));
                sqlx::Error::Io(IoError::new(ErrorKind::NotConnected, words))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIMARY: Facts = Facts {
        in_recovery: false,
        read_only: false,
        timeline: Some(2),
    };
    fn hosts(wanted: Wanted) -> Hosts {
        let names = ["a", "b", "c"].map(String::from).to_vec();
        Hosts::new(names, Access::Reads, wanted, HOST_TIME_MAX)
    }

    #[test]
    fn a_primary_of_an_older_timeline_is_refused_until_the_newer_one_is_long_gone() {
        let hosts = hosts(Wanted::ReadWrite);
        hosts.choose(0, Some(PRIMARY));
        let promoted = Facts {
            timeline: Some(3),
            ..PRIMARY
        };
        hosts.choose(1, Some(promoted));
        assert!(hosts.refusal(Some(promoted)).is_none());
        let refusal = hosts.refusal(Some(PRIMARY)).expect("refused");
        assert!(refusal.contains("timeline 2"), "{refusal}");
        hosts.lose(1);
        assert!(hosts.refusal(Some(PRIMARY)).is_some());
        lock(&hosts.state).lost_at = Instant::now().checked_sub(TIMELINE_KEPT * 2);
        assert!(hosts.refusal(Some(PRIMARY)).is_none());
    }

    #[test]
    fn connections_from_before_a_move_are_given_up_and_others_are_not() {
        let hosts = hosts(Wanted::ReadWrite);
        let old = Duration::from_secs(60);
        hosts.choose(0, Some(PRIMARY));
        hosts.lose(0);
        hosts.choose(0, Some(PRIMARY));
        assert!(!hosts.was_left_since(old), "the same server was found again");
        hosts.lose(0);
        hosts.choose(2, Some(PRIMARY));
        assert!(hosts.was_left_since(old));
        assert!(!hosts.was_left_since(Duration::ZERO));
    }

    #[test]
    fn a_wrong_password_is_an_error_unless_a_host_lets_us_in() {
        let wrong = || sqlx::Error::Configuration("wrong password".into());
        let mut all = Refusals::default();
        all.failed("a", wrong());
        assert!(matches!(
            all.error(Wanted::ReadWrite),
            sqlx::Error::Configuration(_)
        ));
        let mut some = Refusals::default();
        some.failed("a", wrong());
        some.refused("b", "a standby");
        let error = some.error(Wanted::ReadWrite);
        assert!(is_outage(&error), "{error}");
        assert!(error.to_string().contains("b: a standby"), "{error}");
    }
}
