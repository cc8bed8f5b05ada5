//! One move: a state machine whose steps can be interrupted anywhere and repeated by another process.

use std::time::{Duration, Instant};

use postrider_proto::TenantId;
use sqlx::{Connection, FromRow, PgConnection};
use tokio_util::sync::CancellationToken;

use super::{
    MoveState,
    parts::{self, PARTS},
    place::{Place, StepError, has_passed, make_partitions, next_transaction},
    run::Mover,
};
use crate::{
    backoff::Backoff,
    bind::BindAll,
    cells::HOME,
    connector::{Access, Connector},
    db_timeout::{WithDbTimeout, within},
    maintenance::erasure,
    ownership::owners::{OwnerRow, Owners},
    store::sending,
    vault::Vault,
};

/// A move that makes no progress for this long leaves its place to others, and gets its next turn after them.
const STUCK_MAX: Duration = Duration::from_secs(20);
/// While a step waits for something.
const WAIT: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
const AFTER_ERROR: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));
/// Reading or writing some rows.
const ROWS_TIME_MAX: Duration = Duration::from_secs(60);
/// An API process asks where the tenant is, and then changes something there.
const BEGUN_FOR: Duration = Duration::from_secs(1);
/// For transactions that emit for a tenant that comes home. Others that begin to do so wait meanwhile. Longer each time, because
/// there may always be one that is open.
const ARRIVE: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
const BEGIN_ARRIVING: &str = "begin; set local statement_timeout = '30s'";
/// At home, with the id of the tenant.
const MOVE_LOCK: i32 = 0x706d_6f76;

#[derive(Debug, FromRow)]
struct Row {
    tenant_id: TenantId,
    source: i16,
    target: i16,
    state: MoveState,
    barrier: Option<String>,
    home_barrier: Option<String>,
    is_new: bool,
    part: i16,
    after: Option<String>,
}

/// Result of a step.
enum Step {
    Done,
    /// With what, in words.
    Waits(String),
    Ended,
}

/// One move.
pub(super) struct Task {
    id: i64,
    home: Connector,
    vault: Vault,
    stop: CancellationToken,
    owners: Owners,
    arrive: Backoff,
}

/// The connections of a move. Dropped together after an error: then the state of each is unknown.
struct Connections {
    home: PgConnection,
    source: Place,
    target: Place,
}

impl Task {
    pub(super) fn new(mover: &Mover, id: i64) -> Self {
        Self {
            id,
            home: mover.home.clone(),
            vault: mover.vault.clone(),
            stop: mover.stop.clone(),
            owners: Owners::default(),
            arrive: ARRIVE,
        }
    }

    pub(super) async fn run(mut self) {
        let (mut wait, mut retry) = (WAIT, AFTER_ERROR);
        let mut connections = None;
        let mut told = None;
        let mut progress = Instant::now();
        loop {
            let pause = match self.step(&mut connections).await {
                Ok(Step::Ended) | Err(StepError::Stopped) => return,
                Ok(Step::Done) => {
                    (wait, retry, progress) = (WAIT, AFTER_ERROR, Instant::now());
                    self.tell(&mut connections, &mut told, None).await;
                    continue;
                }
                Ok(Step::Waits(reason)) => {
                    self.tell(&mut connections, &mut told, Some(reason)).await;
                    wait.delay()
                }
                Err(error) => {
                    tracing::warn!(move_id = self.id, %error, "moving a tenant failed; retrying");
                    self.tell(&mut connections, &mut told, Some(error.to_string()))
                        .await;
                    connections = None;
                    retry.delay()
                }
            };
            let paused = self.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
            if paused.is_none() || progress.elapsed() > STUCK_MAX {
                return;
            }
        }
    }

    /// What the move waits for is shown. Not being able to say so is no reason to fail.
    async fn tell(
        &self,
        connections: &mut Option<Connections>,
        told: &mut Option<String>,
        now: Option<String>,
    ) {
        if *told == now {
            return;
        }
        let write = async {
            // A cell may be out of reach.
            let mut own = None;
            let home = match connections {
                Some(connections) => &mut connections.home,
                None => own.insert(self.home.connect().await?),
            };
            sqlx::query("update postrider.tenant_moves set waits_for = $2 where id = $1 and ended_at is null")
                .bind_all((self.id, &now))
                .execute(home)
                .await
        };
        if write.with_db_timeout().await.is_ok() {
            *told = now;
        }
    }

    async fn step(&mut self, connections: &mut Option<Connections>) -> Result<Step, StepError> {
        if self.stop.is_cancelled() {
            return Err(StepError::Stopped);
        }
        let connections = match connections {
            Some(connections) => connections,
            none => match self.connect().await? {
                Some(opened) => none.insert(opened),
                None => return Ok(Step::Ended),
            },
        };
        let Some(row) = read(&mut connections.home, self.id).await? else {
            return Ok(Step::Ended);
        };
        connections.source.check_lock(row.tenant_id).await?;
        connections.target.check_lock(row.tenant_id).await?;
        match row.state {
            MoveState::Stopping => self.stop_tenant(connections, &row).await,
            MoveState::Copying => self.copy(connections, &row).await,
            MoveState::Switching => Ok(self.arrive(&mut connections.home).await?.0),
            MoveState::Erasing => self.leave_source(connections, &row).await,
            MoveState::Cancelling => self.leave_target(connections, &row).await,
            MoveState::Done | MoveState::Cancelled => Ok(Step::Ended),
        }
    }

    /// Opens all connections and takes the locks. `None`: another process is at it, or this installation must not.
    async fn connect(&mut self) -> Result<Option<Connections>, StepError> {
        let mut home = self
            .home
            .connect()
            .with_db_timeout()
            .await
            .map_err(StepError::Home)?;
        let Some(row) = read(&mut home, self.id).await? else {
            return Ok(None);
        };
        let ours: bool = sqlx::query_scalar("select pg_try_advisory_lock($1, $2)")
            .bind_all((MOVE_LOCK, row.tenant_id))
            .fetch_one(&mut home)
            .with_db_timeout()
            .await
            .map_err(StepError::Home)?;
        // The cells belong to the installation that this database is a copy of.
        let restored = sending::state(&mut home)
            .with_db_timeout()
            .await
            .map_err(StepError::Home)?
            .restored;
        if !ours || restored {
            return Ok(None);
        }
        // It does not need the target.
        while let Some(step) = self.go_on_at_home(&mut home, &row).await? {
            if let Step::Waits(reason) = step {
                return Err(StepError::Waits(reason));
            }
        }
        let source = self.open(&mut home, row.source, row.tenant_id).await?;
        let target = self.open(&mut home, row.target, row.tenant_id).await?;
        Ok(Some(Connections { home, source, target }))
    }

    async fn open(&self, home: &mut PgConnection, cell: i16, tenant: TenantId) -> Result<Place, StepError> {
        let (name, sealed): (String, Option<Vec<u8>>) =
            sqlx::query_as("select name, url from postrider.cells where id = $1")
                .bind(cell)
                .fetch_one(home)
                .with_db_timeout()
                .await
                .map_err(StepError::Home)?;
        let connector = match sealed {
            None => self.home.clone(),
            Some(sealed) => self
                .address(cell, &sealed)
                .ok_or_else(|| StepError::Address(name.clone()))?,
        };
        Place::open(name, connector, tenant).await
    }

    fn address(&self, cell: i16, sealed: &[u8]) -> Option<Connector> {
        let url = self.vault.open_cell_url(cell, sealed).ok()?;
        Connector::parse(&url, Access::Writes).ok()
    }

    /// Until nothing can be added at the source, and nothing of the tenant is in flight there.
    async fn stop_tenant(&mut self, at: &mut Connections, row: &Row) -> Result<Step, StepError> {
        let source = &mut at.source;
        if source.has_tenant(row.tenant_id).await? != Some(false) {
            return Ok(Step::Waits(format!("cell {} to stop the tenant", source.name)));
        }
        if row.is_new {
            return Ok(Step::Waits(
                "requests that were made when the move began".to_owned(),
            ));
        }
        let (Some(barrier), Some(home_barrier)) = (&row.barrier, &row.home_barrier) else {
            let barrier = next_transaction(&mut source.connection)
                .await
                .map_err(source.failed())?;
            let home_barrier = next_transaction(&mut at.home).await.map_err(StepError::Home)?;
            return self
                .advance(&mut at.home, Advance::Barriers(barrier, home_barrier))
                .await;
        };
        let open_at = match has_passed(&mut source.connection, barrier)
            .await
            .map_err(source.failed())?
        {
            true if has_passed(&mut at.home, home_barrier)
                .await
                .map_err(StepError::Home)? =>
            {
                None
            }
            true => Some("home"),
            false => Some(source.name.as_str()),
        };
        if let Some(name) = open_at {
            return Ok(Step::Waits(format!(
                "transactions that were open in cell {name} when the move began"
            )));
        }
        let behind: Vec<OwnerRow> = sqlx::query_as(include_str!("sql/owners_not_quiet.sql"))
            .bind(row.tenant_id)
            .fetch_all(&mut source.connection)
            .with_db_timeout()
            .await
            .map_err(source.failed())?;
        if self.owners.count_alive(&behind, Instant::now()) > 0 {
            return Ok(Step::Waits("attempts in flight".to_owned()));
        }
        self.advance(&mut at.home, Advance::Copying).await
    }

    /// The next rows.
    async fn copy(&self, at: &mut Connections, row: &Row) -> Result<Step, StepError> {
        let (source, target) = (&mut at.source, &mut at.target);
        let Some(part) = PARTS.get(row.part as usize) else {
            return self.advance(&mut at.home, Advance::Switch).await;
        };
        if row.part == 0 && row.after.is_none() {
            if target.has_tenant(row.tenant_id).await?.is_none() {
                return Ok(Step::Waits(format!(
                    "cell {} to learn of the tenant",
                    target.name
                )));
            }
            make_partitions(source, target, row.tenant_id).await?;
        }
        let read = part.read(&mut source.connection, row.tenant_id, row.after.as_deref());
        let rows = within(ROWS_TIME_MAX, read).await.map_err(source.failed())?;
        if rows.count > 0 {
            let write = parts::write(&mut target.connection, part.table, &rows.rows);
            within(ROWS_TIME_MAX, write).await.map_err(target.failed())?;
        }
        let next = match rows.last {
            Some(last) => Advance::Copied(row.part, Some(last), rows.count),
            None => Advance::Copied(row.part + 1, None, rows.count),
        };
        self.advance(&mut at.home, next).await
    }

    /// The tenant comes home: events that waited there are emitted before any other.
    async fn arrive(&mut self, home: &mut PgConnection) -> Result<(Step, bool), StepError> {
        const LOCK_NOT_AVAILABLE: &str = "55P03";
        let lock_timeout = self.arrive.delay().as_millis().to_string();
        let step = async {
            let mut transaction = home.begin_with(BEGIN_ARRIVING).await?;
            sqlx::query("select set_config('lock_timeout', $1, true)")
                .bind(lock_timeout)
                .execute(&mut *transaction)
                .await?;
            let arrived: bool = sqlx::query_scalar("select postrider.arrive_at_home($1)")
                .bind(self.id)
                .fetch_one(&mut *transaction)
                .await?;
            transaction.commit().await?;
            Ok(arrived)
        };
        match within(ROWS_TIME_MAX, step).await {
            Ok(arrived) => {
                self.arrive = ARRIVE;
                Ok((Step::Done, arrived))
            }
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) => {
                let reason = "transactions that emit for the tenant at home".to_owned();
                Ok((Step::Waits(reason), false))
            }
            Err(error) => Err(StepError::Home(error)),
        }
    }

    /// The tenant lives at the target: erases what is left at the source.
    async fn leave_source(&self, at: &mut Connections, row: &Row) -> Result<Step, StepError> {
        if at.target.has_tenant(row.tenant_id).await? != Some(true) {
            return Ok(Step::Waits(format!(
                "cell {} to accept the tenant",
                at.target.name
            )));
        }
        self.erase(&mut at.source, row.tenant_id).await?;
        self.advance(&mut at.home, Advance::Done).await
    }

    /// A tenant that did not leave home after all has events that waited there. Returns what it waits for, if it does.
    async fn go_on_at_home(&mut self, home: &mut PgConnection, row: &Row) -> Result<Option<Step>, StepError> {
        if row.source != HOME || row.state != MoveState::Cancelling {
            return Ok(None);
        }
        match self.arrive(home).await? {
            (Step::Done, true) => Ok(None),
            (step, _) => Ok(Some(step)),
        }
    }

    /// Erases what was copied. The tenant goes on where it was since the move was cancelled.
    async fn leave_target(&mut self, at: &mut Connections, row: &Row) -> Result<Step, StepError> {
        if let Some(waits) = self.go_on_at_home(&mut at.home, row).await? {
            return Ok(waits);
        }
        // Otherwise the next move might take the mark of this one for its own.
        if at.source.has_tenant(row.tenant_id).await? != Some(true) {
            return Ok(Step::Waits(format!(
                "cell {} to go on with the tenant",
                at.source.name
            )));
        }
        if at.target.has_tenant(row.tenant_id).await?.is_some() {
            self.erase(&mut at.target, row.tenant_id).await?;
        }
        self.advance(&mut at.home, Advance::Cancelled).await
    }

    async fn erase(&self, place: &mut Place, tenant: TenantId) -> Result<(), StepError> {
        if place.has_tenant(tenant).await? != Some(false) {
            let error = sqlx::Error::Protocol("the tenant lives here".to_owned());
            return Err(place.failed()(error));
        }
        let failed = place.failed();
        match erasure::erase_moved(&mut place.connection, tenant, &self.stop).await {
            Err(erasure::Interrupted::Stopped) => Err(StepError::Stopped),
            Err(erasure::Interrupted::Database(error)) => Err(failed(error)),
            Ok(()) => Ok(()),
        }
    }

    async fn advance(&self, home: &mut PgConnection, to: Advance) -> Result<Step, StepError> {
        let statement = match &to {
            Advance::Barriers(..) => {
                "update postrider.tenant_moves set barrier = $2::xid8, home_barrier = $3::xid8
                 where id = $1 and state = 'stopping'"
            }
            Advance::Copying => include_str!("sql/stopped.sql"),
            Advance::Copied(..) => {
                "update postrider.tenant_moves set part = $2, after = $3, copied = copied + $4
                 where id = $1 and state = 'copying'"
            }
            Advance::Switch => include_str!("sql/switch.sql"),
            Advance::Done => {
                "update postrider.tenant_moves set state = 'done', ended_at = clock_timestamp(), waits_for = null
                 where id = $1 and state = 'erasing'"
            }
            Advance::Cancelled => {
                "update postrider.tenant_moves set state = 'cancelled', ended_at = clock_timestamp(), waits_for = null
                 where id = $1 and state = 'cancelling'"
            }
        };
        let query = sqlx::query(statement).bind(self.id);
        let query = match to {
            Advance::Barriers(barrier, home_barrier) => query.bind(barrier).bind(home_barrier),
            Advance::Copied(part, after, count) => query.bind(part).bind(after).bind(count),
            _ => query,
        };
        query
            .execute(home)
            .with_db_timeout()
            .await
            .map_err(StepError::Home)?;
        Ok(Step::Done)
    }
}

enum Advance {
    /// At the source and at home.
    Barriers(String, String),
    Copying,
    /// Part, last row, number of rows.
    Copied(i16, Option<String>, i64),
    Switch,
    Done,
    Cancelled,
}

async fn read(home: &mut PgConnection, id: i64) -> Result<Option<Row>, StepError> {
    sqlx::query_as(
        "select tenant_id, source, target, state, barrier::text, home_barrier::text, part, after,
                created_at > clock_timestamp() - $2 * interval '1 millisecond' as is_new
         from postrider.tenant_moves where id = $1 and ended_at is null",
    )
    .bind_all((id, BEGUN_FOR.as_millis() as i64))
    .fetch_optional(home)
    .with_db_timeout()
    .await
    .map_err(StepError::Home)
}
