//! Learns of commits that the reader should read, without polling where that is possible.
//!
//! Producers commit in transactions of their own. If each of them sent a notification, their commits would wait for each
//! other. So they send one only while a dispatcher holds the wake lock (`postrider.wake()`, called by triggers): one that
//! can share the lock sends nothing, and keeps its share until it has committed. Taking the lock therefore means that
//! every commit without a notification is visible, and one more read shows it.
//!
//! One dispatcher holds the lock for all of them; every dispatcher listens. Under load, or when producers wait for each
//! other, the holder releases it, so that producers pay nothing, and all poll. It says so in a notification; if it dies
//! instead, the others notice at their next check, and read once more. A server that allows prepared transactions is
//! always polled: `PREPARE TRANSACTION` fails after a notification.

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    Wake, backoff::Backoff, connector::Connector, db_timeout::WithDbTimeout,
    health::database::warn_unless_outage,
};

const CHANNEL: &str = "postrider";
/// Sent by the holder when it has released the lock.
const RELEASED: &str = "released";
/// Sent when the tables of that name have changed. All other notifications are for the reader.
const REPLAYS: &str = "replays";
const NOTICES: &str = "notices";
const MOVES: &str = "moves";
/// Checks while another dispatcher holds the lock: whether it still does.
const CHECK_EVERY: Duration = Duration::from_millis(500);
/// Checks by the holder: only shows the others, and the server, that it is alive.
const HOLDER_CHECK_EVERY: Duration = Duration::from_secs(4);
/// How often background tasks look for work of which they would be notified.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Checks while polling: whether it is quiet enough for notifications. Less often after each time that it was not.
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
/// The lock was kept this long: it is quiet.
const QUIET: Duration = Duration::from_secs(2);
/// A server that allows prepared transactions may be restarted without.
const PREPARES_CHECK_EVERY: Duration = Duration::from_secs(60);
const RECONNECT_WAIT: Duration = Duration::from_secs(1);
/// More notifications than this in one window are a load under which polling is cheaper.
const NOTIFICATIONS_MAX: usize = 50;
const WINDOW: Duration = Duration::from_millis(100);
/// So many may be a load that is slow only because producers wait for each other.
const CONTENDED_MIN: usize = 5;
/// A look at the locks costs as much as reading an event.
const CONTENDED_CHECK_EVERY: Duration = Duration::from_millis(500);
/// More rows than this since the last check are such a load too.
const ROWS_MAX: usize = 50;
/// The server ends the session of a stopped process, and with it the lock.
const SESSION_IDLE_MAX: &str = "10s";

/// What the reader and the engine know of commits.
#[derive(Debug, Clone, Default)]
pub(crate) struct Commits(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Every commit that matters is notified.
    notified: AtomicBool,
    wake: Wake,
    replays: Wake,
    notices: Wake,
    moves: Wake,
    /// Rows read since the watcher last checked.
    rows: AtomicUsize,
}

impl Commits {
    /// Whether it is enough to wait for [`Commits::wait`]. If not, the reader has to poll.
    pub(crate) fn are_notified(&self) -> bool {
        self.0.notified.load(Ordering::Acquire)
    }

    /// Waits for a commit, or for a change of [`Commits::are_notified`].
    pub(crate) async fn wait(&self) {
        self.0.wake.wait().await;
    }

    pub(crate) fn count(&self, rows: usize) {
        self.0.rows.fetch_add(rows, Ordering::Relaxed);
    }

    /// Waits until replays may have been requested or changed, or until it is time to look: after `poll_every` where no
    /// notification would come.
    pub(crate) async fn wait_for_replays(&self, poll_every: Duration) {
        self.wait_or_look(&self.0.replays, poll_every).await;
    }

    /// The same for notices.
    pub(crate) async fn wait_for_notices(&self, poll_every: Duration) {
        self.wait_or_look(&self.0.notices, poll_every).await;
    }

    /// The same for moves of tenants.
    pub(crate) async fn wait_for_moves(&self, poll_every: Duration) {
        self.wait_or_look(&self.0.moves, poll_every).await;
    }

    async fn wait_or_look(&self, wake: &Wake, poll_every: Duration) {
        let look_after = match self.are_notified() {
            true => LOOK_EVERY,
            false => poll_every,
        };
        let _ = tokio::time::timeout(look_after, wake.wait()).await;
    }

    /// A read that begins after this sees every commit that was not notified.
    fn set(&self, notified: bool) {
        self.0.notified.store(notified, Ordering::Release);
        for wake in [&self.0.wake, &self.0.replays, &self.0.notices, &self.0.moves] {
            wake.now();
        }
    }
}

/// Runs until `stop`.
pub(crate) async fn run(connector: Connector, commits: Commits, stop: CancellationToken) {
    let connector = connector.with(|options| options.options([("idle_session_timeout", SESSION_IDLE_MAX)]));
    loop {
        let pool = connector.pool_lazily(PgPoolOptions::new().max_connections(1), None);
        let ended = watch(&pool, &connector, &commits, &stop).await;
        commits.set(false);
        // Not returned to the pool: its session may hold the lock.
        let _ = tokio::time::timeout(RECONNECT_WAIT, pool.close()).await;
        if stop.is_cancelled() {
            return;
        }
        if let Err(error) = ended {
            warn_unless_outage!(error, "waiting for notifications failed; polling the database");
        }
        tokio::time::sleep(RECONNECT_WAIT).await;
    }
}

/// Watches on one connection, until it is lost or `stop` is cancelled.
async fn watch(
    pool: &sqlx::PgPool,
    connector: &Connector,
    commits: &Commits,
    stop: &CancellationToken,
) -> Result<(), sqlx::Error> {
    let mut listener = PgListener::connect_with(pool).with_db_timeout().await?;
    listener.eager_reconnect(false);
    listener.listen(CHANNEL).with_db_timeout().await?;
    let (prepares, pid): (bool, i32) =
        sqlx::query_as("select current_setting('max_prepared_transactions')::int > 0, pg_backend_pid()")
            .fetch_one(&mut listener)
            .with_db_timeout()
            .await?;
    if prepares {
        drop(listener);
        tokio::select! {
            () = tokio::time::sleep(PREPARES_CHECK_EVERY) => {}
            () = stop.cancelled() => {}
        }
        return Ok(());
    }
    let now = Instant::now();
    let mut watcher = Watcher {
        listener,
        commits,
        pid,
        holder: None,
        held_since: now,
        retry: RETRY,
        window: (now, 0),
        contention_checked_at: now,
        check_at: now,
    };
    let opened_at = Instant::now();
    while watcher.step(stop).await?.is_continue() {
        if connector.is_outdated(opened_at.elapsed()) {
            break;
        }
    }
    Ok(())
}

struct Watcher<'c> {
    listener: PgListener,
    commits: &'c Commits,
    /// Our session.
    pid: i32,
    /// The session that holds the wake lock.
    holder: Option<i32>,
    held_since: Instant,
    retry: Backoff,
    /// Notifications since this time.
    window: (Instant, usize),
    contention_checked_at: Instant,
    check_at: Instant,
}

impl Watcher<'_> {
    /// Handles one notification or check. Breaks when the connection is lost or the dispatcher stops.
    async fn step(&mut self, stop: &CancellationToken) -> Result<ControlFlow<()>, sqlx::Error> {
        tokio::select! {
            received = self.listener.try_recv() => match received? {
                None => return Ok(ControlFlow::Break(())),
                Some(sent) if sent.payload() == RELEASED => {
                    if !self.holds() {
                        self.polls();
                    }
                }
                Some(sent) if sent.payload() == REPLAYS => self.commits.0.replays.now(),
                Some(sent) if sent.payload() == NOTICES => self.commits.0.notices.now(),
                Some(sent) if sent.payload() == MOVES => self.commits.0.moves.now(),
                Some(_) => self.committed().await?,
            },
            () = tokio::time::sleep_until(self.check_at) => self.check().await?,
            () = stop.cancelled() => {
                if self.holds() {
                    self.release().await?;
                }
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn holds(&self) -> bool {
        self.holder == Some(self.pid)
    }

    async fn committed(&mut self) -> Result<(), sqlx::Error> {
        self.commits.0.wake.now();
        let now = Instant::now();
        if now > self.window.0 + WINDOW {
            self.window = (now, 0);
        }
        self.window.1 += 1;
        let count = self.window.1;
        if self.holds()
            && (count > NOTIFICATIONS_MAX || count >= CONTENDED_MIN && self.is_contended(now).await?)
        {
            self.release().await?;
        }
        Ok(())
    }

    /// False as well if it was checked a moment ago.
    async fn is_contended(&mut self, now: Instant) -> Result<bool, sqlx::Error> {
        if now < self.contention_checked_at + CONTENDED_CHECK_EVERY {
            return Ok(false);
        }
        self.contention_checked_at = now;
        sqlx::query_scalar("select postrider.notifications_are_contended()")
            .fetch_one(&mut self.listener)
            .with_db_timeout()
            .await
    }

    async fn release(&mut self) -> Result<(), sqlx::Error> {
        sqlx::query("select pg_notify($1, $2), pg_advisory_unlock(postrider.wake_lock())")
            .bind(CHANNEL)
            .bind(RELEASED)
            .execute(&mut self.listener)
            .with_db_timeout()
            .await?;
        self.polls();
        Ok(())
    }

    /// Takes the lock when it is quiet, unless another dispatcher holds it.
    async fn check(&mut self) -> Result<(), sqlx::Error> {
        let rows = self.commits.0.rows.swap(0, Ordering::Relaxed);
        if self.holder.is_none() && rows > ROWS_MAX {
            self.check_at = Instant::now() + self.retry.delay();
            return Ok(());
        }
        let holder: Option<i32> = sqlx::query_scalar("select postrider.hold_wake_lock($1)")
            .bind(self.holds())
            .fetch_one(&mut self.listener)
            .with_db_timeout()
            .await?;
        let now = Instant::now();
        if holder != self.holder {
            // Commits between two holders were not notified: one more read shows them.
            self.holder = holder;
            self.held_since = now;
            self.commits.set(holder.is_some());
        } else if holder.is_some() && now > self.held_since + QUIET {
            self.retry.reset();
        }
        self.check_at = now
            + match holder {
                None => self.retry.delay(),
                Some(_) if self.holds() => HOLDER_CHECK_EVERY,
                Some(_) => CHECK_EVERY,
            };
        Ok(())
    }

    fn polls(&mut self) {
        self.holder = None;
        self.commits.set(false);
        self.check_at = Instant::now() + self.retry.delay();
    }
}
