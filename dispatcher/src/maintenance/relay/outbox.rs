//! The outbox of the home database, as one cell's relay reads it: on one connection, whose snapshots are compared.
//! Invariant: one relay of a cell reads at a time, so that the events of a key stay in order.

use std::{ops::Range, time::Duration};

use sqlx::{Connection, FromRow, PgConnection};

use super::{
    aside::LeftOut,
    batch::{Processed, Refused, Row, emit_operational},
};
use crate::{
    bind::BindAll,
    connector::Connector,
    db_timeout::{WithDbTimeout, within},
    deliver::snapshot::Snapshot,
};

/// Numbers of one look at the tail.
const CHUNK: i64 = 20_000;
/// Waiting events of one tenant in a step, and tenants.
const WAITING_TENANT_MAX: i64 = 200;
const WAITING_TENANTS_MAX: i64 = 100;
/// A long backlog is read in parts, but each part is searched for in all of it.
const TAIL_TIME_MAX: Duration = Duration::from_secs(60);
/// "cell", with the number of the cell.
const RELAY_LOCK: i32 = 0x6365_6c6c;
/// The plans do not depend on statistics, as those of the hot path: `tests/it/cells.rs` checks them. A deletion that is lost in a crash repeats an emit, which has no
/// effect, and a relay that has died silently gives up its lock.
const SETTINGS: [(&str, &str); 10] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
    ("synchronous_commit", "off"),
    ("lock_timeout", "5s"),
    ("statement_timeout", "60s"),
    ("idle_session_timeout", "70s"),
];

#[derive(Debug, thiserror::Error)]
pub(super) enum HomeError {
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error("the database of POSTRIDER_HOME_DATABASE_URL is not home, or does not know cell {0}")]
    NotHome(i16),
    #[error("the home database is a restored copy that nobody has confirmed")]
    Restored,
    #[error("invalid snapshot from the server: {0}")]
    Snapshot(String),
}

/// An event in the tail, with the size of its data.
#[derive(Debug, Clone, Copy, FromRow)]
pub(super) struct Numbered {
    pub(super) n: i64,
    pub(super) bytes: i32,
}

#[derive(Debug, FromRow)]
pub(super) struct Stored {
    pub(super) n: i64,
    pub(super) tenant_id: i32,
    pub(super) tenant: String,
    pub(super) is_deleted: bool,
    /// The tenant lives in this cell.
    pub(super) is_ours: bool,
    pub(super) must_wait: bool,
    pub(super) age_seconds: f64,
    r#type: String,
    data: String,
    id: String,
    version: Option<String>,
    ordering_key: Option<String>,
    context: Option<Vec<u8>>,
}

impl From<Stored> for Row {
    fn from(stored: Stored) -> Self {
        Self {
            n: stored.n,
            tenant: stored.tenant,
            r#type: stored.r#type,
            data: stored.data,
            id: stored.id,
            version: stored.version,
            ordering_key: stored.ordering_key,
            context: stored.context,
        }
    }
}

pub(super) struct Outbox {
    connection: PgConnection,
    cell: i16,
    /// Of the waiting tenants, which take turns.
    last_tenant: i32,
}

impl Outbox {
    /// None while another relay of this cell reads.
    pub(super) async fn open(home: &Connector, cell: i16) -> Result<Option<Self>, HomeError> {
        let named = home.with(|options| options.application_name("postrider relay").options(SETTINGS));
        let mut connection = named.connect().with_db_timeout().await?;
        let (is_home, restored): (bool, bool) = sqlx::query_as(
            "select (select id from postrider.this_cell) = 0 and exists (select from postrider.cells where id = $1),
                    (select restored from postrider.sending_state())",
        )
        .bind(cell)
        .fetch_one(&mut connection)
        .with_db_timeout()
        .await?;
        if !is_home {
            return Err(HomeError::NotHome(cell));
        }
        if restored {
            return Err(HomeError::Restored);
        }
        let ours: bool = sqlx::query_scalar("select pg_try_advisory_lock($1, $2)")
            .bind_all((RELAY_LOCK, i32::from(cell)))
            .fetch_one(&mut connection)
            .with_db_timeout()
            .await?;
        if !ours {
            connection.close().await?;
            return Ok(None);
        }
        let mut outbox = Self {
            connection,
            cell,
            last_tenant: 0,
        };
        outbox.renumber().await?;
        Ok(Some(outbox))
    }

    /// After a restore into another cluster, transaction numbers may lie in its future: see `store/restored.rs`.
    async fn renumber(&mut self) -> Result<(), sqlx::Error> {
        sqlx::query(
            "update postrider.cell_outbox set xid = pg_current_xact_id()
             where cell_id = $1 and xid >= (select pg_snapshot_xmax(pg_current_snapshot()))",
        )
        .bind(self.cell)
        .execute(&mut self.connection)
        .with_db_timeout()
        .await?;
        Ok(())
    }

    pub(super) async fn snapshot(&mut self) -> Result<Snapshot, HomeError> {
        let text: String = sqlx::query_scalar("select pg_current_snapshot()::text")
            .fetch_one(&mut self.connection)
            .with_db_timeout()
            .await?;
        Snapshot::parse(&text).ok_or(HomeError::Snapshot(text))
    }

    /// The next events of these transactions, and whether there may be more.
    pub(super) async fn tail(
        &mut self,
        new: &[Range<u64>],
        after: i64,
    ) -> Result<(Vec<Numbered>, bool), sqlx::Error> {
        let bounds = |bound: fn(&Range<u64>) -> u64| -> Vec<String> {
            new.iter().map(|range| bound(range).to_string()).collect()
        };
        let read = sqlx::query_as(include_str!("sql/outbox_tail.sql"))
            .bind(self.cell)
            .bind(bounds(|range| range.start))
            .bind(bounds(|range| range.end))
            .bind_all((after, CHUNK))
            .fetch_all(&mut self.connection);
        let numbers: Vec<Numbered> = within(TAIL_TIME_MAX, read).await?;
        let is_full = numbers.len() as i64 == CHUNK;
        Ok((numbers, is_full))
    }

    pub(super) async fn page(&mut self, numbers: &[i64]) -> Result<Vec<Stored>, sqlx::Error> {
        sqlx::query_as(include_str!("sql/outbox_page.sql"))
            .bind_all((numbers, self.cell))
            .fetch_all(&mut self.connection)
            .with_db_timeout()
            .await
    }

    /// The first events that wait beside the tail, of the next tenants in turn.
    pub(super) async fn waiting(
        &mut self,
        passed: &Snapshot,
        left_out: LeftOut,
    ) -> Result<Vec<Numbered>, sqlx::Error> {
        let tenants: Vec<i32> = sqlx::query_scalar(include_str!("sql/outbox_waiting_tenants.sql"))
            .bind_all((self.cell, self.last_tenant, WAITING_TENANTS_MAX))
            .fetch_all(&mut self.connection)
            .with_db_timeout()
            .await?;
        let is_full = tenants.len() as i64 == WAITING_TENANTS_MAX;
        self.last_tenant = tenants.last().copied().filter(|_| is_full).unwrap_or(0);
        if tenants.is_empty() {
            return Ok(Vec::new());
        }
        sqlx::query_as(include_str!("sql/outbox_waiting.sql"))
            .bind_all((tenants, passed.as_str(), WAITING_TENANT_MAX))
            .bind_all((
                left_out.tenants,
                left_out.rows,
                left_out.key_tenants,
                left_out.keys,
            ))
            .fetch_all(&mut self.connection)
            .with_db_timeout()
            .await
    }

    /// Of refused events, those whose type and version exist here: the cell has not heard of them yet.
    pub(super) async fn known_here(&mut self, numbers: &[i64]) -> Result<Vec<i64>, sqlx::Error> {
        sqlx::query_scalar(
            "select o.n from postrider.cell_outbox o join postrider.tenants t on t.id = o.tenant_id
             where o.n = any($1) and t.deleted_at is null
               and exists (select from postrider.event_types y join postrider.schemas s on s.type_id = y.id
                           where y.name = o.type and y.deleted_at is null
                             and (o.version is null or s.version = o.version))",
        )
        .bind(numbers)
        .fetch_all(&mut self.connection)
        .with_db_timeout()
        .await
    }

    /// These events leave the tail: they wait until they are accepted, in the order of their numbers.
    pub(super) async fn make_wait(&mut self, numbers: &[i64]) -> Result<(), sqlx::Error> {
        sqlx::query("update postrider.cell_outbox set cell_id = null where n = any($1)")
            .bind(numbers)
            .execute(&mut self.connection)
            .with_db_timeout()
            .await?;
        Ok(())
    }

    pub(super) async fn remove(&mut self, processed: &Processed) -> Result<(), sqlx::Error> {
        if !processed.refused.is_empty() {
            self.keep_refused(&processed.refused).await?;
        }
        sqlx::query("delete from postrider.cell_outbox where n = any($1)")
            .bind(&processed.rows)
            .execute(&mut self.connection)
            .with_db_timeout()
            .await?;
        Ok(())
    }

    async fn keep_refused(&mut self, refused: &[Refused]) -> Result<(), sqlx::Error> {
        let column = |part: fn(&Refused) -> &str| -> Vec<&str> { refused.iter().map(part).collect() };
        sqlx::query(
            "insert into postrider.cell_outbox_refused
                (n, tenant_id, cell_id, type, data, id, version, ordering_key, created_at, refusal, message)
             select o.n, o.tenant_id, $1, o.type, o.data, o.id, o.version, o.ordering_key, o.created_at, r.refusal, r.message
             from unnest($2::bigint[], $3::text[], $4::text[]) as r (n, refusal, message)
             join postrider.cell_outbox o on o.n = r.n
             on conflict do nothing",
        )
        .bind(self.cell)
        .bind(refused.iter().map(|one| one.n).collect::<Vec<_>>())
        .bind(column(|one| &one.refusal))
        .bind(column(|one| &one.message))
        .execute(&mut self.connection)
        .with_db_timeout()
        .await?;
        Ok(())
    }

    /// For a while, `emit` refuses more events of these tenants at once.
    pub(super) async fn note_quotas(&mut self, used: &[(i32, String)]) -> Result<(), sqlx::Error> {
        sqlx::query(
            "insert into postrider.cell_quotas_used (tenant_id, refusal, until)
             select u.tenant_id, u.refusal, clock_timestamp() + interval '6 seconds'
             from unnest($1::int[], $2::text[]) as u (tenant_id, refusal)
             on conflict (tenant_id) do update set refusal = excluded.refusal, until = excluded.until",
        )
        .bind(used.iter().map(|(tenant, _)| *tenant).collect::<Vec<_>>())
        .bind(
            used.iter()
                .map(|(_, refusal)| refusal.as_str())
                .collect::<Vec<_>>(),
        )
        .execute(&mut self.connection)
        .with_db_timeout()
        .await?;
        Ok(())
    }

    /// Operational events of the cell, for tenants that live elsewhere. Durable before they are removed there.
    pub(super) async fn bring_home(&mut self, rows: &[Row]) -> Result<(), sqlx::Error> {
        let work = async {
            let mut transaction = self
                .connection
                .begin_with("begin; set local synchronous_commit = on")
                .await?;
            for row in rows {
                if let Some(refused) = emit_operational(&mut transaction, row).await? {
                    tracing::info!(
                        tenant = row.tenant,
                        refusal = refused.refusal,
                        "an operational event of this cell was refused at home"
                    );
                }
            }
            transaction.commit().await
        };
        work.with_db_timeout().await
    }
}
