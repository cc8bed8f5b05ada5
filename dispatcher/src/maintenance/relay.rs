//! The relay: moves committed events from producers' own databases into the main one.
//! Invariant: an event is emitted here before it is removed there, and its id was fixed there. After a crash between
//! the two it is emitted again with the same id and content, which has no effect: exactly once, whichever side dies.
//! Events that are blocked, because another transaction holds their key or id, are set aside (`aside.rs`) with all
//! later events of the key, and a tenant that is over its quota as a whole. A restored copy takes nothing from an outbox:
//! the events there belong to the installation it is a copy of. Every statement has a server-side timeout, so that none is left behind.

mod aside;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use sqlx::{Connection, FromRow, PgConnection, PgPool, Postgres, Transaction};

use crate::{
    Wake,
    backoff::Backoff,
    bind::BindAll,
    connector::Connector,
    db_timeout::{WithDbTimeout, within},
    store::{
        schema::{self, SchemaError, SchemaSet},
        sending,
    },
    telemetry::metrics::METRICS,
};
use aside::{Aside, Strand};

const BATCH_MAX: i64 = 200;
const IDLE_WAIT: Duration = Duration::from_millis(50);
/// While another dispatcher relays from the same source.
const OTHERS_WAIT: Duration = Duration::from_secs(1);
const AFTER_ERROR: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
const STEP_TIME_MAX: Duration = Duration::from_secs(60);
/// In the main database. A lock not acquired this soon is held by a slow transaction.
const BEGIN_EMIT: &str = "begin; set local lock_timeout = '100ms'; set local statement_timeout = '10s'";
/// In the source, whose transaction stays open during the emit: longer than a step may take.
const BEGIN_STEP: &str = "begin; set local lock_timeout = '5s'; set local statement_timeout = '10s'; \
                          set local idle_in_transaction_session_timeout = '70s'";
/// Statements of one step that may time out on a lock: for a tenant found to be blocked, for one already known to be,
/// and for all together.
const WAITS_TENANT_MAX: usize = 12;
const WAITS_AGAIN_MAX: usize = 2;
const WAITS_MAX: usize = 60;
/// These events stay in the outbox until the tenant's quota admits them.
const QUOTA_REFUSALS: [&str; 2] = ["PR429", "PR507"];
/// Only one relay reads from a source, so that the events of a key stay in order.
const RELAY_LOCK: i64 = 0x706f_7374_7269_6465;

/// Installs the outbox in a producer's own database.
pub async fn migrate_outbox(database: &Connector) -> Result<(), SchemaError> {
    let mut connection = database.connect().await?;
    let is_main: bool = sqlx::query_scalar("select to_regclass('postrider.events') is not null")
        .fetch_one(&mut connection)
        .await?;
    if is_main {
        return Err(SchemaError::NotAnOutbox);
    }
    schema::apply(&mut connection, &SchemaSet::outbox()).await?;
    connection.close().await?;
    Ok(())
}

/// Relays from one source until it is dropped.
pub(crate) async fn run(number: usize, source: Connector, pool: PgPool, wake: Wake) {
    let mut backoff = AFTER_ERROR;
    let mut aside = Aside::default();
    loop {
        if let Err(error) = relay(&source, &pool, &wake, &mut aside, &mut backoff).await {
            // The URL contains a password: the source is logged by its position in the list.
            tracing::warn!(source = number, %error, "relaying from a source failed; retrying");
        }
        tokio::time::sleep(backoff.delay()).await;
    }
}

async fn relay(
    source: &Connector,
    pool: &PgPool,
    wake: &Wake,
    aside: &mut Aside,
    backoff: &mut Backoff,
) -> Result<(), sqlx::Error> {
    while sending::state(pool).with_db_timeout().await?.restored {
        tokio::time::sleep(OTHERS_WAIT).await;
    }
    let mut connection = source.connect().with_db_timeout().await?;
    loop {
        let began = Instant::now();
        let step = within(STEP_TIME_MAX, step(&mut connection, pool, aside)).await?;
        backoff.reset();
        match step {
            Step::Moved => wake.now(),
            // A long scan, past many events set aside, is not repeated at once.
            Step::Nothing => tokio::time::sleep(IDLE_WAIT.max(began.elapsed())).await,
            Step::Others => tokio::time::sleep(OTHERS_WAIT).await,
        }
    }
}

enum Step {
    Moved,
    Nothing,
    Others,
}

#[derive(Debug, FromRow)]
struct Row<T = String> {
    n: i64,
    tenant: T,
    r#type: T,
    data: T,
    id: T,
    version: Option<T>,
    ordering_key: Option<T>,
}

/// Raw bytes from the source: an event that is not UTF-8 must not block the others.
impl Row<Vec<u8>> {
    fn read(self) -> Result<Row, std::string::FromUtf8Error> {
        Ok(Row {
            n: self.n,
            tenant: String::from_utf8(self.tenant)?,
            r#type: String::from_utf8(self.r#type)?,
            data: String::from_utf8(self.data)?,
            id: String::from_utf8(self.id)?,
            version: self.version.map(String::from_utf8).transpose()?,
            ordering_key: self.ordering_key.map(String::from_utf8).transpose()?,
        })
    }
}

impl Row {
    fn strand(&self) -> Strand {
        match &self.ordering_key {
            Some(key) => Strand::Key(key.clone()),
            None => Strand::Row(self.n),
        }
    }
}

/// The main database's rejection of an event.
#[derive(Debug)]
struct Refused {
    n: i64,
    refusal: String,
    message: String,
}

/// Events to remove from the outbox.
#[derive(Debug, Default)]
struct Processed {
    /// Including rejected ones.
    rows: Vec<i64>,
    refused: Vec<Refused>,
}

async fn step(source: &mut PgConnection, pool: &PgPool, aside: &mut Aside) -> Result<Step, sqlx::Error> {
    let mut transaction = source.begin_with(BEGIN_STEP).await?;
    let ours: bool = sqlx::query_scalar("select pg_try_advisory_xact_lock($1)")
        .bind(RELAY_LOCK)
        .fetch_one(&mut *transaction)
        .await?;
    if !ours {
        return Ok(Step::Others);
    }
    let mut processed = Processed::default();
    let mut rows = Vec::new();
    for stored in page(&mut transaction, aside).await? {
        let n = stored.n;
        match stored.read() {
            Ok(row) => rows.push(row),
            Err(_) => {
                let (refusal, message) = ("PR422".to_owned(), "the event is not valid UTF-8".to_owned());
                processed.rows.push(n);
                processed.refused.push(Refused { n, refusal, message });
            }
        }
    }
    // The address of the main database may lead to another one by now.
    if !rows.is_empty() && sending::state(pool).await?.restored {
        return Ok(Step::Others);
    }
    emit_unblocked(pool, &rows, aside, &mut processed).await?;
    if processed.rows.is_empty() {
        return Ok(Step::Nothing);
    }
    remove(&mut transaction, &processed).await?;
    transaction.commit().await?;
    METRICS
        .relayed
        .increment((processed.rows.len() - processed.refused.len()) as u64);
    Ok(Step::Moved)
}

/// The first events not set aside. Always from the beginning: one committed late has a low number.
async fn page(source: &mut PgConnection, aside: &mut Aside) -> Result<Vec<Row<Vec<u8>>>, sqlx::Error> {
    let left_out = aside.left_out(Instant::now());
    sqlx::query_as(
        "select n, convert_to(tenant, e.name) as tenant, convert_to(type, e.name) as type, convert_to(data, e.name) as data,
                convert_to(id, e.name) as id, convert_to(version, e.name) as version,
                convert_to(ordering_key, e.name) as ordering_key
         from postrider.outbox o
         -- A database without an encoding has any bytes, and would refuse to call them UTF-8.
         cross join (select case getdatabaseencoding() when 'SQL_ASCII' then 'SQL_ASCII' else 'UTF8' end::name as name) e
         where o.tenant <> all($2) and o.n <> all($3)
           and not exists (select from unnest($4::text[], $5::text[]) as a (tenant, key)
                           where a.tenant = o.tenant and a.key = o.ordering_key)
         order by n limit $1",
    )
    .bind_all((BATCH_MAX, left_out.tenants, left_out.rows, left_out.key_tenants))
    .bind(left_out.keys)
    .fetch_all(source)
    .await
}

/// All in one statement; if that is blocked, one per tenant, and for a blocked tenant in ever smaller parts.
async fn emit_unblocked(
    pool: &PgPool,
    rows: &[Row],
    aside: &mut Aside,
    processed: &mut Processed,
) -> Result<(), sqlx::Error> {
    let mut by_tenant: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        by_tenant.entry(&row.tenant).or_default().push(row);
    }
    if rows.is_empty() || emit(pool, &rows.iter().collect::<Vec<_>>(), aside, processed).await? {
        return Ok(());
    }
    let mut waits = 1;
    for (tenant, rows) in by_tenant {
        if waits >= WAITS_MAX {
            break;
        }
        waits += emit_in_parts(pool, tenant, rows, aside, processed).await?;
    }
    Ok(())
}

/// Returns how many statements timed out. A strand, the events of one key or one event without a key, is never split.
async fn emit_in_parts(
    pool: &PgPool,
    tenant: &str,
    rows: Vec<&Row>,
    aside: &mut Aside,
    processed: &mut Processed,
) -> Result<usize, sqlx::Error> {
    let waits_max = if aside.knows(tenant) {
        WAITS_AGAIN_MAX
    } else {
        WAITS_TENANT_MAX
    };
    let mut strands: BTreeMap<Strand, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        strands.entry(row.strand()).or_default().push(row);
    }
    let mut parts = vec![strands.into_iter().collect::<Vec<_>>()];
    let mut waits = 0;
    while let Some(mut part) = parts.pop() {
        let rows: Vec<&Row> = part.iter().flat_map(|(_, rows)| rows).copied().collect();
        if emit(pool, &rows, aside, processed).await? {
            continue;
        }
        waits += 1;
        if part.len() > 1 {
            parts.push(part.split_off(part.len() / 2));
            parts.push(part);
        } else if let Some((strand, _)) = part.pop() {
            aside.put(tenant, Some(strand), Instant::now());
        }
        if waits >= waits_max && !parts.is_empty() {
            aside.put(tenant, None, Instant::now());
            break;
        }
    }
    Ok(waits)
}

/// Commits the events in the main database and collects rejected ones. Returns false when they are blocked.
async fn emit(
    pool: &PgPool,
    rows: &[&Row],
    aside: &mut Aside,
    processed: &mut Processed,
) -> Result<bool, sqlx::Error> {
    let refused = match try_emit(pool, rows).await {
        Err(error) if is_about_rows(&error) => {
            tracing::debug!(%error, rows = rows.len(), "relayed events are blocked by a lock; retrying later");
            return Ok(false);
        }
        done => done?,
    };
    let (over_quota, refused): (Vec<Refused>, Vec<Refused>) = refused
        .into_iter()
        .partition(|one| QUOTA_REFUSALS.contains(&one.refusal.as_str()));
    let stays = |row: &Row| over_quota.iter().any(|one| one.n == row.n);
    for row in rows {
        match stays(row) {
            true => aside.put_behind_quota(&row.tenant, Instant::now()),
            false => {
                aside.forget(&row.tenant, &row.strand());
                processed.rows.push(row.n);
            }
        }
    }
    processed.refused.extend(refused);
    Ok(true)
}

/// A lock timeout or any other error specific to these rows: not the server, the connection or the schema.
fn is_about_rows(error: &sqlx::Error) -> bool {
    const CLASSES: [&str; 8] = ["21", "22", "23", "40", "54", "55", "P0", "PR"];
    const STATEMENT_TIMEOUT: &str = "57014";
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| code == STATEMENT_TIMEOUT || CLASSES.iter().any(|class| code.starts_with(class)))
}

async fn try_emit(pool: &PgPool, rows: &[&Row]) -> Result<Vec<Refused>, sqlx::Error> {
    fn column<'r>(rows: &[&'r Row], part: impl Fn(&'r Row) -> Option<&'r str>) -> Vec<Option<&'r str>> {
        rows.iter().map(|row| part(row)).collect()
    }
    let mut transaction = pool.begin_with(BEGIN_EMIT).await?;
    let emitted =
        sqlx::query_as("select position, refusal, message from postrider.emit_all($1, $2, $3, $4, $5, $6)")
            .bind(column(rows, |row| Some(&row.tenant)))
            .bind(column(rows, |row| Some(&row.r#type)))
            .bind(column(rows, |row| Some(&row.data)))
            .bind(column(rows, |row| Some(&row.id)))
            .bind(column(rows, |row| row.version.as_deref()))
            .bind(column(rows, |row| row.ordering_key.as_deref()))
            .fetch_all(&mut *transaction)
            .await;
    let results: Vec<(i32, Option<String>, Option<String>)> = match emitted {
        Ok(results) => results,
        Err(error) => {
            // Releases its locks before others are tried.
            transaction.rollback().await?;
            return Err(error);
        }
    };
    transaction.commit().await?;
    Ok(results
        .into_iter()
        .filter_map(|(position, refusal, message)| {
            let row = rows.get(usize::try_from(position).ok()?)?;
            Some(Refused {
                n: row.n,
                refusal: refusal?,
                message: message.unwrap_or_default(),
            })
        })
        .collect())
}

async fn remove(
    transaction: &mut Transaction<'_, Postgres>,
    Processed { rows, refused }: &Processed,
) -> Result<(), sqlx::Error> {
    if !refused.is_empty() {
        METRICS.relay_refused.increment(refused.len() as u64);
        sqlx::query(
            "insert into postrider.outbox_refused
                (n, tenant, type, data, id, version, ordering_key, created_at, refusal, message)
             select o.n, o.tenant, o.type, o.data, o.id, o.version, o.ordering_key, o.created_at, r.refusal, r.message
             from unnest($1::bigint[], $2::text[], $3::text[]) as r (n, refusal, message)
             join postrider.outbox o on o.n = r.n",
        )
        .bind(refused.iter().map(|one| one.n).collect::<Vec<_>>())
        .bind(refused.iter().map(|one| one.refusal.as_str()).collect::<Vec<_>>())
        .bind(refused.iter().map(|one| one.message.as_str()).collect::<Vec<_>>())
        .execute(&mut **transaction)
        .await?;
    }
    sqlx::query("delete from postrider.outbox where n = any($1)")
        .bind(rows)
        .execute(&mut **transaction)
        .await?;
    Ok(())
}
