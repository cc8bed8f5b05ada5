//! Learns of commits that the reader should read, without polling where that is possible.
//!
//! Producers commit in transactions of their own. If each of them sent a notification, their commits would wait for each
//! other. So they send one only while a dispatcher holds the wake lock (`postrider.wake()`, called by triggers): one that
//! can share the lock sends nothing, and keeps its share until it has committed. Taking the lock therefore means that
//! every commit without a notification is visible, and one more read shows it.
//!
//! One dispatcher holds the lock for all of them; every dispatcher listens. Under load the holder releases it, so that
//! producers pay nothing, and all poll. It says so in a notification; if it dies instead, the others notice at their next
//! check. A server that allows prepared transactions is always polled: `PREPARE TRANSACTION` fails after a notification.

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{Wake, db_timeout::WithDbTimeout};

const CHANNEL: &str = "postrider";
/// Sent by the holder when it has released the lock.
const RELEASED: &str = "released";
/// Checks while notified: whether the lock is still held, and our connection alive.
const CHECK_EVERY: Duration = Duration::from_millis(500);
/// Checks while polling: whether it is quiet enough for notifications.
const RETRY_EVERY: Duration = Duration::from_millis(200);
/// A server that allows prepared transactions may be restarted without.
const PREPARES_CHECK_EVERY: Duration = Duration::from_secs(60);
const RECONNECT_WAIT: Duration = Duration::from_secs(1);
/// More notifications than this in one window are a load under which polling is cheaper.
const NOTIFICATIONS_MAX: usize = 50;
const WINDOW: Duration = Duration::from_millis(100);
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

    /// A read that begins after this sees every commit that was not notified.
    fn set(&self, notified: bool) {
        self.0.notified.store(notified, Ordering::Release);
        self.0.wake.now();
    }
}

/// Runs until `stop`.
pub(crate) async fn run(options: PgConnectOptions, commits: Commits, stop: CancellationToken) {
    let options = options.options([("idle_session_timeout", SESSION_IDLE_MAX)]);
    loop {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .connect_lazy_with(options.clone());
        let ended = tokio::select! {
            ended = watch(&pool, &commits) => ended,
            () = stop.cancelled() => Ok(()),
        };
        commits.set(false);
        // Not returned to the pool: its session may hold the lock.
        let _ = tokio::time::timeout(RECONNECT_WAIT, pool.close()).await;
        if stop.is_cancelled() {
            return;
        }
        if let Err(error) = ended {
            tracing::warn!(%error, "waiting for notifications failed; polling the database");
        }
        tokio::time::sleep(RECONNECT_WAIT).await;
    }
}

/// Watches on one connection, until it is lost.
async fn watch(pool: &sqlx::PgPool, commits: &Commits) -> Result<(), sqlx::Error> {
    let mut listener = PgListener::connect_with(pool).with_db_timeout().await?;
    listener.eager_reconnect(false);
    listener.listen(CHANNEL).with_db_timeout().await?;
    let prepares: bool = sqlx::query_scalar("select current_setting('max_prepared_transactions')::int > 0")
        .fetch_one(&mut listener)
        .with_db_timeout()
        .await?;
    if prepares {
        drop(listener);
        tokio::time::sleep(PREPARES_CHECK_EVERY).await;
        return Ok(());
    }
    let mut watcher = Watcher {
        listener,
        commits,
        holder: false,
        window: (Instant::now(), 0),
        check_at: Instant::now(),
    };
    while watcher.step().await?.is_continue() {}
    Ok(())
}

struct Watcher<'c> {
    listener: PgListener,
    commits: &'c Commits,
    /// Holds the wake lock.
    holder: bool,
    /// Notifications since this time.
    window: (Instant, usize),
    check_at: Instant,
}

impl Watcher<'_> {
    /// Handles one notification or check. Breaks when the connection is lost.
    async fn step(&mut self) -> Result<ControlFlow<()>, sqlx::Error> {
        tokio::select! {
            received = self.listener.try_recv() => match received? {
                None => return Ok(ControlFlow::Break(())),
                Some(sent) if sent.payload() == RELEASED => {
                    if !self.holder {
                        self.polls();
                    }
                }
                Some(_) => self.committed().await?,
            },
            () = tokio::time::sleep_until(self.check_at) => self.check().await?,
        }
        Ok(ControlFlow::Continue(()))
    }

    async fn committed(&mut self) -> Result<(), sqlx::Error> {
        self.commits.0.wake.now();
        let now = Instant::now();
        if now > self.window.0 + WINDOW {
            self.window = (now, 0);
        }
        self.window.1 += 1;
        if self.holder && self.window.1 > NOTIFICATIONS_MAX {
            sqlx::query("select pg_notify($1, $2), pg_advisory_unlock(postrider.wake_lock())")
                .bind(CHANNEL)
                .bind(RELEASED)
                .execute(&mut self.listener)
                .with_db_timeout()
                .await?;
            self.holder = false;
            self.polls();
        }
        Ok(())
    }

    /// Takes the lock when it is quiet, unless another dispatcher holds it.
    async fn check(&mut self) -> Result<(), sqlx::Error> {
        let rows = self.commits.0.rows.swap(0, Ordering::Relaxed);
        if !self.commits.are_notified() && rows > ROWS_MAX {
            self.check_at = Instant::now() + RETRY_EVERY;
            return Ok(());
        }
        let (held, holder): (bool, bool) =
            sqlx::query_as("select held, ours from postrider.hold_wake_lock($1)")
                .bind(self.holder)
                .fetch_one(&mut self.listener)
                .with_db_timeout()
                .await?;
        self.holder = holder;
        self.check_at = Instant::now() + if held { CHECK_EVERY } else { RETRY_EVERY };
        if held != self.commits.are_notified() {
            self.commits.set(held);
        }
        Ok(())
    }

    fn polls(&mut self) {
        self.commits.set(false);
        self.check_at = Instant::now() + RETRY_EVERY;
    }
}
