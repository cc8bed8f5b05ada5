//! Whether this process can do its job now, and if not, why. `/readyz` and the metrics `postrider_ready`,
//! `postrider_shards_owned` and `postrider_oldest_due_seconds` are computed here when they are asked for, from what each
//! part last reported: a part that hangs makes the process unready instead of leaving its last value behind.
//! Invariant: the state is that of one process. The root sets the role; without that nothing is reported.

pub mod database;
mod vital;

use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use metrics::Gauge;

use crate::{
    lock::lock,
    telemetry::metrics::{self as series, METRICS},
};
pub(crate) use vital::{Load, Vital};

/// Without a sign of life for this long a part counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(10);

static ROLE: OnceLock<Role> = OnceLock::new();
static STARTED: AtomicBool = AtomicBool::new(false);
static STOPPING: AtomicBool = AtomicBool::new(false);
static HAS_DISPATCHER: AtomicBool = AtomicBool::new(false);
static DISPATCHER: Mutex<Option<Arc<Vital>>> = Mutex::new(None);

/// Why this process is not ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    Starting,
    Stopping,
    DatabaseDown,
    DatabaseReadOnly,
    /// The database has not been checked for this long: the process is starved or suspended.
    Unchecked(Duration),
    NoLease,
    EngineStuck(Duration),
    QueueUnread(Duration),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => f.write_str("starting"),
            Self::Stopping => f.write_str("stopping"),
            Self::DatabaseDown => f.write_str("the database does not respond"),
            Self::DatabaseReadOnly => {
                f.write_str("the database is read-only (a standby or a demoted primary)")
            }
            Self::Unchecked(ago) => write!(f, "the database was last checked {} s ago", ago.as_secs()),
            Self::NoLease => f.write_str("the dispatcher has no valid lease and sends nothing"),
            Self::EngineStuck(ago) => write!(f, "the dispatcher has been stuck for {} s", ago.as_secs()),
            Self::QueueUnread(ago) => write!(f, "the queue was last read {} s ago", ago.as_secs()),
        }
    }
}

struct Role {
    name: &'static str,
    ready: Gauge,
    database_up: Gauge,
    database_writable: Gauge,
    clock_offset: Gauge,
}

/// Registers the metrics of this process's health. Call once, after the recorder is installed.
pub fn begin(role: &'static str) {
    ROLE.get_or_init(|| Role {
        name: role,
        ready: series::labelled_gauge(
            "postrider_ready",
            "Whether this process can do its job now: 1 or 0, as /readyz reports it",
            &[("role", role)],
        ),
        database_up: series::gauge("postrider_database_up", "Whether the database responds: 1 or 0"),
        database_writable: series::gauge(
            "postrider_database_writable",
            "Whether the database accepts writes: 1 or 0",
        ),
        clock_offset: series::gauge(
            "postrider_clock_offset_seconds",
            "This machine's clock minus the database's, as last measured",
        ),
    });
}

/// The role that was set, for log lines.
pub fn role() -> &'static str {
    ROLE.get().map_or("", |role| role.name)
}

/// Everything that the role needs runs.
pub fn started() {
    STARTED.store(true, Ordering::Release);
}

pub fn stopping() {
    STOPPING.store(true, Ordering::Release);
}

pub fn is_stopping() -> bool {
    STOPPING.load(Ordering::Acquire)
}

/// There will be a dispatcher in this process. Until it runs, the process is not ready: after a restore, its first start
/// may take a while.
pub fn expect_dispatcher() {
    HAS_DISPATCHER.store(true, Ordering::Release);
}

/// The dispatcher of this process.
pub(crate) fn watch(vital: Arc<Vital>) {
    *lock(&DISPATCHER) = Some(vital);
}

/// None if this process is ready.
pub fn not_ready() -> Vec<Reason> {
    if is_stopping() {
        return vec![Reason::Stopping];
    }
    let vital = dispatcher();
    let has_all = vital.is_some() || !HAS_DISPATCHER.load(Ordering::Acquire);
    let mut reasons = Vec::new();
    if !(STARTED.load(Ordering::Acquire) && has_all) {
        reasons.push(Reason::Starting);
    }
    reasons.extend(database::reason());
    reasons.extend(vital.iter().flat_map(|vital| vital.reasons()));
    reasons
}

fn dispatcher() -> Option<Arc<Vital>> {
    lock(&DISPATCHER).clone()
}

/// Sets the metrics that depend on the time of the scrape.
pub fn sample() {
    let Some(role) = ROLE.get() else { return };
    let flag = |is: bool| if is { 1.0 } else { 0.0 };
    role.ready.set(flag(not_ready().is_empty()));
    role.database_up.set(flag(database::is_up()));
    role.database_writable.set(flag(database::is_writable()));
    role.clock_offset.set(database::clock_offset_seconds());
    if let Some(vital) = dispatcher() {
        let load = vital.load();
        METRICS.lease_valid.set(flag(vital.has_lease()));
        METRICS.shards_owned.set(load.shards as f64);
        METRICS.oldest_by_endpoint.set(load.oldest_by_endpoint);
        METRICS.oldest_by_dispatcher.set(load.oldest_by_dispatcher);
    }
}
