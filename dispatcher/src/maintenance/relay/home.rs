//! The relay of a cell: moves events that were emitted at home, for tenants that live in this cell, into this database. It reads
//! the home database's outbox with the exact tail, as the readers of the queue do: what became visible between two snapshots of
//! one connection, and on a new connection everything.
//!
//! Each event of the tail is relayed, refused for good, or leaves the tail: then it waits, with all later events of its tenant,
//! until the cell accepts it. Events that were emitted while their tenant was moving wait from the start. So the tail never stops
//! for one tenant, and nothing about single events is kept in memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::ErrorKind,
    time::{Duration, Instant},
};

use sqlx::{FromRow, PgPool};
use tokio::time::timeout;

use super::{
    aside::Aside,
    batch::{Processed, Refused, Row, emit_page},
    outbox::{HomeError, Numbered, Outbox, Stored},
};
use crate::{
    Wake, backoff::Backoff, cells::HOME, connector::Connector, db_timeout::WithDbTimeout,
    deliver::snapshot::Snapshot, health::database::reports, store::sending, telemetry::metrics::METRICS,
};

/// Events emitted by one statement, and their data: a page is held in memory twice.
const PAGE_MAX: usize = 1_000;
const PAGE_BYTES_MAX: usize = 4 << 20;
const PAGE_TIME_MAX: Duration = Duration::from_secs(60);
/// Between two looks at an outbox in which nothing was new.
const IDLE_WAIT: Duration = Duration::from_millis(20);
/// The same at home, whose own tenants have events there only when they have just come from a cell.
const IDLE_WAIT_AT_HOME: Duration = Duration::from_millis(250);
/// After a few events: a moment later there are more, and a statement costs as much for one as for several.
const GATHER_WAIT: Duration = Duration::from_millis(15);
const FEW: usize = 100;
/// Between two looks at events that wait beside the tail, and at what the cell itself wants to bring home.
const WAITING_EVERY: Duration = Duration::from_millis(250);
const OPERATIONAL_EVERY: Duration = Duration::from_secs(1);
const OPERATIONAL_MAX: i64 = 100;
/// While another dispatcher of the cell relays.
const OTHERS_WAIT: Duration = Duration::from_secs(2);
/// Between two looks at whether there are cells.
const ALONE_WAIT: Duration = Duration::from_secs(10);
const AFTER_ERROR: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
/// Between two lines about a relay that does not work.
const LOG_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
enum RelayError {
    #[error("{0}")]
    Home(#[from] HomeError),
    #[error("emitting in this database failed: {0}")]
    Cell(#[source] sqlx::Error),
}

impl From<sqlx::Error> for RelayError {
    /// Of the statements of [`Outbox`].
    fn from(error: sqlx::Error) -> Self {
        Self::Home(error.into())
    }
}

pub(crate) struct HomeRelay {
    /// Of `POSTRIDER_HOME_DATABASE_URL`.
    pub(crate) home: Option<Connector>,
    /// To this database, past any pooler.
    pub(crate) direct: Connector,
    pub(crate) pool: PgPool,
    pub(crate) wake: Wake,
}

/// What this database is.
enum Place {
    /// Home, without other cells: nothing is relayed.
    Alone,
    /// Home, with cells: a tenant that has come here may have events in the outbox.
    Home,
    Cell(i16),
}

impl HomeRelay {
    /// Relays until it is dropped.
    pub(crate) async fn run(self) {
        let (mut aside, mut progress) = (Aside::default(), Progress::default());
        loop {
            match self.relay(&mut aside, &mut progress).await {
                Ok(wait) => tokio::time::sleep(wait).await,
                Err(error) => {
                    METRICS.relay_failures.increment(1);
                    progress.failed(&error);
                    tokio::time::sleep(progress.backoff.delay()).await;
                }
            }
        }
    }

    /// Returns only if there is nothing to relay for now, and after which time to look again.
    async fn relay(&self, aside: &mut Aside, progress: &mut Progress) -> Result<Duration, RelayError> {
        let (cell, home) = match (self.place().await.map_err(RelayError::Cell)?, &self.home) {
            (Place::Alone, _) => return Ok(ALONE_WAIT),
            (Place::Home, _) => (HOME, &self.direct),
            (Place::Cell(cell), Some(home)) => (cell, home),
            (Place::Cell(cell), None) => {
                tracing::warn!(
                    cell,
                    "POSTRIDER_HOME_DATABASE_URL is not set: events that are emitted at home for this cell wait there"
                );
                return Ok(LOG_EVERY);
            }
        };
        if self.is_copy().await? {
            return Ok(OTHERS_WAIT);
        }
        let Some(outbox) = Outbox::open(home, cell).await? else {
            return Ok(OTHERS_WAIT);
        };
        let mut session = Session {
            relay: self,
            outbox,
            cell,
            aside,
            previous: Snapshot::nothing(),
            waiting_at: None,
            operational_at: None,
        };
        loop {
            match session.cycle().await? {
                Cycle::Read(0) => {
                    METRICS.relay_lag.set(0.0);
                    let wait = if cell == HOME {
                        IDLE_WAIT_AT_HOME
                    } else {
                        IDLE_WAIT
                    };
                    tokio::time::sleep(wait).await;
                }
                Cycle::Read(count) => {
                    self.wake.now();
                    if count < FEW {
                        tokio::time::sleep(GATHER_WAIT).await;
                    }
                }
                Cycle::Copy => return Ok(OTHERS_WAIT),
            }
            progress.made();
        }
    }

    async fn place(&self) -> Result<Place, sqlx::Error> {
        let (cell, others): (i16, bool) = sqlx::query_as(
            "select c.id, exists (select from postrider.cells where id <> 0) from postrider.this_cell c",
        )
        .fetch_one(&self.pool)
        .with_db_timeout()
        .await?;
        Ok(match (cell, others) {
            (HOME, false) => Place::Alone,
            (HOME, true) => Place::Home,
            (cell, _) => Place::Cell(cell),
        })
    }

    /// A restored copy takes nothing: the events belong to the installation it is a copy of.
    async fn is_copy(&self) -> Result<bool, RelayError> {
        let state = sending::state(&self.pool).with_db_timeout().await;
        Ok(state.map_err(RelayError::Cell)?.restored)
    }

    /// Operational events of this cell, for tenants that live elsewhere.
    async fn operational(&self) -> Result<Vec<Row>, sqlx::Error> {
        let events: Vec<Operational> = sqlx::query_as(
            "select o.n, t.slug as tenant, o.type, o.data, o.id, o.version
             from postrider.cell_outbox o join postrider.tenants t on t.id = o.tenant_id order by o.n limit $1",
        )
        .bind(OPERATIONAL_MAX)
        .fetch_all(&self.pool)
        .with_db_timeout()
        .await?;
        Ok(events.into_iter().map(Row::from).collect())
    }

    async fn forget_operational(&self, rows: &[Row]) -> Result<(), sqlx::Error> {
        sqlx::query("delete from postrider.cell_outbox where n = any($1)")
            .bind(rows.iter().map(|row| row.n).collect::<Vec<_>>())
            .execute(&self.pool)
            .with_db_timeout()
            .await?;
        Ok(())
    }
}

#[derive(FromRow)]
struct Operational {
    n: i64,
    tenant: String,
    r#type: String,
    data: String,
    id: String,
    version: Option<String>,
}

impl From<Operational> for Row {
    fn from(event: Operational) -> Self {
        Self {
            n: event.n,
            tenant: event.tenant,
            r#type: event.r#type,
            data: event.data,
            id: event.id,
            version: event.version,
            ordering_key: None,
            context: None,
        }
    }
}

/// Whether the relay gets on, and what was said about it.
struct Progress {
    backoff: Backoff,
    made_at: Instant,
    logged_at: Option<Instant>,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            backoff: AFTER_ERROR,
            made_at: Instant::now(),
            logged_at: None,
        }
    }
}

impl Progress {
    fn made(&mut self) {
        self.made_at = Instant::now();
        self.backoff.reset();
        if self.logged_at.take().is_some() {
            tracing::info!("events are relayed from the home database again");
        }
    }

    fn failed(&mut self, error: &RelayError) {
        METRICS.relay_lag.set(self.made_at.elapsed().as_secs_f64());
        let is_outage = matches!(error, RelayError::Cell(error) if reports(error));
        if !is_outage && self.logged_at.is_none_or(|at| at.elapsed() > LOG_EVERY) {
            self.logged_at = Some(Instant::now());
            tracing::warn!(%error, "relaying from the home database failed; retrying");
        }
    }
}

enum Cycle {
    /// So many events were looked at.
    Read(usize),
    /// This database is a restored copy.
    Copy,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Tail,
    Waiting,
}

/// State that belongs to one connection to the home database.
struct Session<'r> {
    relay: &'r HomeRelay,
    outbox: Outbox,
    cell: i16,
    aside: &'r mut Aside,
    /// Everything visible in it was read.
    previous: Snapshot,
    waiting_at: Option<Instant>,
    operational_at: Option<Instant>,
}

impl Session<'_> {
    async fn cycle(&mut self) -> Result<Cycle, RelayError> {
        let mut read = 0;
        let now = self.outbox.snapshot().await?;
        if now != self.previous {
            let Some(count) = self.tail(&now).await? else {
                return Ok(Cycle::Copy);
            };
            read += count;
            self.previous = now;
        }
        if is_due(self.waiting_at, WAITING_EVERY) {
            let Some(count) = self.waiting().await? else {
                return Ok(Cycle::Copy);
            };
            read += count;
            // There may be more than one page: the next one follows at once.
            self.waiting_at = (count == 0).then(Instant::now);
        }
        if self.cell != HOME && is_due(self.operational_at, OPERATIONAL_EVERY) {
            self.operational_at = Some(Instant::now());
            self.bring_home().await?;
        }
        Ok(Cycle::Read(read))
    }

    /// Returns how many there were; none if this database is a copy.
    async fn tail(&mut self, now: &Snapshot) -> Result<Option<usize>, RelayError> {
        let new = now.since(&self.previous);
        let (mut after, mut read) = (0, 0);
        loop {
            let (numbers, is_full) = self.outbox.tail(&new, after).await?;
            read += numbers.len();
            if let Some(last) = numbers.last() {
                after = last.n;
            }
            if !self.pages(&numbers, Origin::Tail).await? {
                return Ok(None);
            }
            if !is_full {
                return Ok(Some(read));
            }
        }
    }

    /// The same for events that wait beside the tail.
    async fn waiting(&mut self) -> Result<Option<usize>, RelayError> {
        let left_out = self.aside.left_out(Instant::now());
        let numbers = self.outbox.waiting(&self.previous, left_out).await?;
        let done = self.pages(&numbers, Origin::Waiting).await?;
        Ok(done.then_some(numbers.len()))
    }

    /// Returns false if this database is a copy.
    async fn pages(&mut self, numbers: &[Numbered], origin: Origin) -> Result<bool, RelayError> {
        for page in pages(numbers) {
            // The address of this database may lead to another one by now.
            if self.relay.is_copy().await? {
                return Ok(false);
            }
            match timeout(PAGE_TIME_MAX, self.page(&page, origin)).await {
                Ok(done) => done?,
                Err(_) => return Err(RelayError::Cell(sqlx::Error::Io(ErrorKind::TimedOut.into()))),
            }
        }
        Ok(true)
    }

    async fn page(&mut self, numbers: &[i64], origin: Origin) -> Result<(), RelayError> {
        let stored = self.outbox.page(numbers).await?;
        let oldest = stored.iter().map(|one| one.age_seconds).fold(0.0, f64::max);
        METRICS.relay_lag.set(oldest);
        let tenants: BTreeMap<String, i32> = stored
            .iter()
            .map(|one| (one.tenant.clone(), one.tenant_id))
            .collect();
        let mut processed = Processed::default();
        let rows = sort(stored, &mut processed);
        emit_page(&self.relay.pool, &rows, self.aside, &mut processed)
            .await
            .map_err(RelayError::Cell)?;
        self.keep_what_is_news(&rows, &mut processed).await?;
        if origin == Origin::Tail {
            let done: BTreeSet<i64> = processed.rows.iter().copied().collect();
            let left: Vec<i64> = numbers.iter().copied().filter(|n| !done.contains(n)).collect();
            if !left.is_empty() {
                self.outbox.make_wait(&left).await?;
            }
        }
        let used: Vec<(i32, String)> = processed
            .over_quota
            .iter()
            .filter_map(|(tenant, refusal)| Some((*tenants.get(tenant)?, refusal.clone())))
            .collect();
        if !used.is_empty() {
            self.outbox.note_quotas(&used).await?;
        }
        self.outbox.remove(&processed).await?;
        let refused = processed.refused.len();
        METRICS.relay_refused.increment(refused as u64);
        METRICS.relayed.increment((processed.rows.len() - refused) as u64);
        Ok(())
    }

    /// Refused events whose tenant, type and version exist at home: this database will hear of them.
    async fn keep_what_is_news(&mut self, rows: &[Row], processed: &mut Processed) -> Result<(), RelayError> {
        let unknown = |one: &Refused| {
            one.refusal == "PR404"
                || one.refusal == "PR422" && matches!(one.field.as_deref(), Some("type" | "version"))
        };
        let doubtful: Vec<i64> = processed
            .refused
            .iter()
            .filter(|one| unknown(one))
            .map(|one| one.n)
            .collect();
        if doubtful.is_empty() {
            return Ok(());
        }
        let known: BTreeSet<i64> = self.outbox.known_here(&doubtful).await?.into_iter().collect();
        processed.rows.retain(|n| !known.contains(n));
        processed.refused.retain(|one| !known.contains(&one.n));
        for row in rows.iter().filter(|row| known.contains(&row.n)) {
            self.aside.put_whole(&row.tenant, Instant::now());
        }
        Ok(())
    }

    async fn bring_home(&mut self) -> Result<(), RelayError> {
        let rows = self.relay.operational().await.map_err(RelayError::Cell)?;
        if rows.is_empty() {
            return Ok(());
        }
        self.outbox.bring_home(&rows).await?;
        self.relay
            .forget_operational(&rows)
            .await
            .map_err(RelayError::Cell)
    }
}

fn is_due(last: Option<Instant>, every: Duration) -> bool {
    last.is_none_or(|at| at.elapsed() >= every)
}

/// In pages that fit in memory. One event always fits.
fn pages(numbers: &[Numbered]) -> Vec<Vec<i64>> {
    let mut pages: Vec<Vec<i64>> = Vec::new();
    let mut bytes = 0;
    for one in numbers {
        let size = usize::try_from(one.bytes).unwrap_or_default();
        bytes += size;
        match pages.last_mut() {
            Some(page) if page.len() < PAGE_MAX && bytes <= PAGE_BYTES_MAX => page.push(one.n),
            _ => {
                pages.push(vec![one.n]);
                bytes = size;
            }
        }
    }
    pages
}

/// Returns what is to be emitted. Events of deleted tenants are erased, as those that were relayed; others are left.
fn sort(stored: Vec<Stored>, processed: &mut Processed) -> Vec<Row> {
    let mut rows = Vec::with_capacity(stored.len());
    for one in stored {
        if one.is_deleted {
            processed.rows.push(one.n);
        } else if one.is_ours && !one.must_wait {
            rows.push(one.into());
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_bounded_by_events_and_by_bytes() {
        let numbers = |sizes: &[i32]| -> Vec<Numbered> {
            let with_numbers = sizes.iter().zip(1..);
            with_numbers
                .map(|(bytes, n)| Numbered { n, bytes: *bytes })
                .collect()
        };
        assert_eq!(pages(&[]), Vec::<Vec<i64>>::new());
        let small: Vec<usize> = pages(&numbers(&[10; 2_500])).iter().map(Vec::len).collect();
        assert_eq!(small, [1_000, 1_000, 500]);
        let half = i32::try_from(PAGE_BYTES_MAX / 2).expect("a size");
        assert_eq!(
            pages(&numbers(&[half, half, 1, half * 3, 1])),
            [vec![1, 2], vec![3], vec![4], vec![5]]
        );
    }
}
