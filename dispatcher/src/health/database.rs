//! Whether the database responds and accepts writes, checked once a second on a connection of its own.
//!
//! An outage is logged once, when it begins, and once when it is over. Everything else that fails because of it reports
//! its error here instead of logging it ([`reports`]). A connection that was opened before the database was last seen
//! read-only is not used again: behind the same address there may be another server by now.

use std::{
    error::Error,
    io::ErrorKind,
    ops::ControlFlow,
    sync::{LazyLock, Mutex},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use sqlx::{
    PgConnection, Row,
    postgres::{PgDatabaseError, PgSeverity},
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::Reason;
use crate::{connector::Connector, db_timeout::within, lock::lock, telemetry::metrics::freshness::CLOCK};

const CHECK_EVERY: Duration = Duration::from_secs(1);
/// During an outage: requests are rejected until a check sees its end.
const CHECK_EVERY_IN_OUTAGE: Duration = Duration::from_millis(200);
/// For one check. A second one, on a new connection, decides.
const CHECK_MAX: Duration = Duration::from_secs(1);
/// Between checks that errors ask for.
const CHECK_WAIT_MIN: Duration = Duration::from_millis(100);
/// After this long without a check the state is not known.
const CHECKED_MAX: Duration = Duration::from_secs(10);
/// Tasks that waited for the database report errors of an outage that is over for about this long.
const LATE_ERRORS: Duration = Duration::from_secs(15);
/// Between two lines about connections that failed while the database responds.
const LOST_EVERY: Duration = Duration::from_secs(10);
const READ_ONLY: &str = "25006";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Unknown,
    Up,
    ReadOnly,
    Down,
}

static STATE: LazyLock<watch::Sender<State>> = LazyLock::new(|| watch::Sender::new(State::Unknown));
static CHECKS: LazyLock<Mutex<Checks>> = LazyLock::new(Mutex::default);
static REPORTED: Notify = Notify::const_new();

#[derive(Default)]
struct Checks {
    at: Option<Instant>,
    read_only_at: Option<Instant>,
    clock_offset_seconds: f64,
    /// When the outage began.
    out_since: Option<Instant>,
    back_at: Option<Instant>,
    /// The first error that was reported since the last check.
    reported: Option<Reported>,
    lost_logged_at: Option<Instant>,
}

struct Reported {
    module: &'static str,
    error: String,
}

/// What one check saw.
struct Sight {
    read_only: bool,
    clock_offset_seconds: f64,
}

fn state() -> State {
    *STATE.borrow()
}

pub fn is_down() -> bool {
    state() == State::Down
}

pub(crate) fn is_up() -> bool {
    matches!(state(), State::Up | State::ReadOnly) && unchecked().is_none()
}

pub(crate) fn is_writable() -> bool {
    state() == State::Up && unchecked().is_none()
}

pub(crate) fn clock_offset_seconds() -> f64 {
    lock(&CHECKS).clock_offset_seconds
}

pub(crate) fn reason() -> Option<Reason> {
    match state() {
        State::Down => Some(Reason::DatabaseDown),
        State::ReadOnly => Some(Reason::DatabaseReadOnly),
        // The process is still starting.
        State::Unknown => None,
        State::Up => unchecked().map(Reason::Unchecked),
    }
}

/// How long ago the last check was, if that is too long.
fn unchecked() -> Option<Duration> {
    let ago = lock(&CHECKS).at.map(|at| at.elapsed());
    ago.filter(|ago| *ago > CHECKED_MAX)
}

/// Returns when the database does not respond.
pub async fn down() {
    // The sender is never dropped.
    let _ = STATE.subscribe().wait_for(|state| *state == State::Down).await;
}

/// The result of `work`, or an error as soon as the database is known to be down. For work that may be abandoned at any
/// point, such as waiting for a connection.
pub async fn unless_down<T>(work: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, sqlx::Error> {
    tokio::select! {
        biased;
        result = work => result,
        () = down() => Err(sqlx::Error::Io(ErrorKind::NotConnected.into())),
    }
}

/// Whether the database is out, or was at this time or later.
pub(crate) fn was_out_since(at: Instant) -> bool {
    matches!(state(), State::Down | State::ReadOnly) || lock(&CHECKS).back_at.is_some_and(|back| back >= at)
}

/// Whether a connection of this age was opened before the database was last seen read-only.
pub(crate) fn is_outdated(age: Duration) -> bool {
    lock(&CHECKS).read_only_at.is_some_and(|at| at.elapsed() < age)
}

/// Whether the error is part of an outage, which is logged once for all: the caller need not log it.
pub fn reports(error: &(dyn Error + 'static)) -> bool {
    reports_from("", error)
}

/// The same, with the module that it happened in.
pub(crate) fn reports_from(module: &'static str, error: &(dyn Error + 'static)) -> bool {
    let Some(found) = in_chain(error).filter(|error| is_outage(error)) else {
        return false;
    };
    tracing::debug!(error = %found, module, "database error");
    lock(&CHECKS).reported.get_or_insert_with(|| Reported {
        module,
        error: found.to_string(),
    });
    REPORTED.notify_one();
    true
}

/// `tracing::warn!` with an error that may be part of an outage.
macro_rules! warn_unless_outage {
    ($error:ident, $($rest:tt)+) => {
        if !$crate::health::database::reports_from(module_path!(), &$error) {
            tracing::warn!(error = %$error, $($rest)+);
        }
    };
}
pub(crate) use warn_unless_outage;

/// The database error that caused this one.
///
/// The job queue's error passes off the source of a database error as its own: it has to be looked into.
pub(crate) fn in_chain<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e sqlx::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<sqlx::Error>() {
            return Some(found);
        }
        if let Some(apalis_postgres::Error::Database(found)) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// Whether the database can't be reached or is read-only, as opposed to one statement that failed.
pub fn is_outage(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(error) => {
            let Some(error) = error.try_downcast_ref::<PgDatabaseError>() else {
                return false;
            };
            // A session that was refused for another reason would be refused again: a password, a name, a right.
            let is_refused = ["28", "3D", "42"]
                .iter()
                .any(|class| error.code().starts_with(class));
            let is_fatal = matches!(error.severity(), PgSeverity::Fatal | PgSeverity::Panic);
            is_fatal && !is_refused
                || error.code() == READ_ONLY
                || ["08", "57P"].iter().any(|class| error.code().starts_with(class))
        }
        _ => false,
    }
}

/// Nothing can be written: a standby, or a primary that was demoted.
pub fn is_read_only(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .and_then(|error| error.code())
        .as_deref()
        == Some(READ_ONLY)
}

/// Waits until the database responds and accepts writes. Returns false if `stop` came first, and an error that waiting
/// would not fix, such as a wrong password.
pub async fn wait_until_writable(
    connector: &Connector,
    stop: &CancellationToken,
) -> Result<bool, sqlx::Error> {
    let mut connection = None;
    loop {
        let seen = match check(connector, &mut connection).await {
            // Whatever listens there is not Postgres.
            Err(error @ sqlx::Error::Protocol(_)) => return Err(error),
            Err(error) if !is_outage(&error) => return Err(error),
            seen => seen,
        };
        observe(&seen);
        if seen.is_ok_and(|sight| !sight.read_only) {
            return Ok(true);
        }
        if pause_before_retry(stop).await.is_break() {
            return Ok(false);
        }
    }
}

/// For work that an outage has interrupted. Breaks if `stop` came first.
pub async fn pause_before_retry(stop: &CancellationToken) -> ControlFlow<()> {
    tokio::select! {
        () = tokio::time::sleep(CHECK_EVERY_IN_OUTAGE) => ControlFlow::Continue(()),
        () = stop.cancelled() => ControlFlow::Break(()),
    }
}

/// Checks until `stop`.
pub async fn watch(connector: Connector, stop: CancellationToken) {
    connector.is_watched();
    let mut connection = None;
    loop {
        observe(&check(&connector, &mut connection).await);
        let wait = match state() {
            State::Up => CHECK_EVERY,
            _ => CHECK_EVERY_IN_OUTAGE,
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = reported(), if state() == State::Up => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Watches a database that is not the process's own, until `stop`: whether it fails to respond, or accepts no writes.
pub async fn watch_other(
    connector: Connector,
    name: &str,
    down: watch::Sender<bool>,
    stop: CancellationToken,
) {
    let mut connection = None;
    loop {
        let seen = check(&connector, &mut connection).await;
        let is_down = !seen.as_ref().is_ok_and(|sight| !sight.read_only);
        let was_down = down.send_replace(is_down);
        match seen {
            Ok(_) if is_down && !was_down => tracing::warn!(database = name, "the database is read-only"),
            Err(error) if !was_down => {
                tracing::warn!(database = name, %error, "the database is unavailable");
            }
            Ok(_) if was_down && !is_down => {
                tracing::info!(database = name, "the database is available again");
            }
            _ => {}
        }
        let wait = match is_down {
            true => CHECK_EVERY_IN_OUTAGE,
            false => CHECK_EVERY,
        };
        if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
            return;
        }
    }
}

/// An error asks for a check at once; many of them for not more than ten in a second.
async fn reported() {
    tokio::time::sleep(CHECK_WAIT_MIN).await;
    REPORTED.notified().await;
}

/// A connection that was lost is no outage: the second try, on a new one, decides.
async fn check(connector: &Connector, connection: &mut Option<PgConnection>) -> Result<Sight, sqlx::Error> {
    let seen = match connection.take() {
        Some(kept) => within(CHECK_MAX, look(kept)).await.ok(),
        None => None,
    };
    let (kept, sight) = match seen {
        Some(seen) => seen,
        None => {
            let opened = async { look(connector.connect().await?).await };
            within(
                CHECK_MAX + connector.connect_time_max().unwrap_or_default(),
                opened,
            )
            .await?
        }
    };
    // The next check connects again, perhaps to another server.
    if sight.read_only {
        connector.give_up();
    }
    *connection = (!sight.read_only).then_some(kept);
    Ok(sight)
}

#[expect(
    clippy::disallowed_methods,
    reason = "compares this machine's clock with the database's"
)]
async fn look(mut connection: PgConnection) -> Result<(PgConnection, Sight), sqlx::Error> {
    let asked_at = Utc::now();
    let row = sqlx::raw_sql(
        "select pg_catalog.pg_is_in_recovery() or pg_catalog.current_setting('transaction_read_only') = 'on',
                pg_catalog.clock_timestamp()",
    )
    .fetch_one(&mut connection)
    .await?;
    let database: DateTime<Utc> = row.try_get(1)?;
    let middle = asked_at + (Utc::now() - asked_at) / 2;
    let sight = Sight {
        read_only: row.try_get(0)?,
        clock_offset_seconds: (middle - database).num_milliseconds() as f64 / 1000.0,
    };
    Ok((connection, sight))
}

/// Notes what a check saw, and logs the beginning and the end of an outage.
fn observe(seen: &Result<Sight, sqlx::Error>) {
    let now = Instant::now();
    let mut checks = lock(&CHECKS);
    checks.at = Some(now);
    let reported = checks.reported.take();
    let next = match seen {
        Ok(sight) => {
            checks.clock_offset_seconds = sight.clock_offset_seconds;
            CLOCK.was_read();
            if sight.read_only {
                checks.read_only_at = Some(now);
                State::ReadOnly
            } else {
                State::Up
            }
        }
        Err(_) => State::Down,
    };
    let before = STATE.send_replace(next);
    match (before, next) {
        (State::Up | State::Unknown, State::Up) => checks.lost(reported, now),
        (_, State::Up) => {
            let seconds = checks.out_since.take().map_or(0, |since| (now - since).as_secs());
            checks.back_at = Some(now);
            tracing::info!(seconds, "the database is available again");
        }
        (State::Up | State::Unknown, _) => {
            checks.out_since = Some(now);
            match seen {
                Ok(_) => tracing::warn!("the database is read-only; waiting until it accepts writes"),
                Err(error) => {
                    tracing::warn!(%error, "the database is unavailable; waiting until it responds")
                }
            }
        }
        // One outage, whatever form it takes.
        (State::Down | State::ReadOnly, _) => {}
    }
}

impl Checks {
    /// The database responds, but something has lost its connection.
    fn lost(&mut self, reported: Option<Reported>, now: Instant) {
        let Some(Reported { module, error }) = reported else {
            return;
        };
        let is_recent = |at: Option<Instant>, limit| at.is_some_and(|at| now - at < limit);
        if is_recent(self.back_at, LATE_ERRORS) || is_recent(self.lost_logged_at, LOST_EVERY) {
            return;
        }
        self.lost_logged_at = Some(now);
        tracing::warn!(
            error,
            module,
            "a database connection failed although the database responds; retrying"
        );
    }
}

#[cfg(test)]
mod tests {
    use apalis::prelude::TaskSinkError;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("wrapped: {0}")]
    struct Wrapped(#[source] sqlx::Error);

    #[test]
    fn an_outage_is_found_behind_other_errors() {
        let refused = || sqlx::Error::Io(ErrorKind::ConnectionRefused.into());
        assert!(is_outage(&refused()) && !is_outage(&sqlx::Error::RowNotFound));
        assert!(in_chain(&Wrapped(refused())).is_some_and(is_outage));
        let of_queue = apalis_postgres::Error::Database(refused());
        assert!(in_chain(&TaskSinkError::PushError(of_queue)).is_some_and(is_outage));
        assert!(in_chain(&std::io::Error::other("x")).is_none());
    }

    #[tokio::test]
    async fn work_is_not_given_up_while_the_database_is_up() {
        let done = unless_down(async { Ok::<_, sqlx::Error>(7) }).await;
        assert_eq!(done.expect("done"), 7);
    }
}
