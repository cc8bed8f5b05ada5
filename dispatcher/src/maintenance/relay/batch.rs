//! Emits relayed events in this database. Events that are blocked, because another transaction holds their key or id, are set
//! aside (`aside.rs`) with all later events of the key, and a tenant that is over its quota as a whole.
//! Invariant: an event is either processed, here or by a refusal, or its strand is set aside.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use sqlx::{FromRow, PgConnection, PgPool};

use super::aside::{Aside, Strand};

/// Events of one statement, if they are not blocked: also the most that may create any number of deliveries.
const PART_MAX: usize = 200;
/// A lock not acquired this soon is held by a slow transaction.
const BEGIN_EMIT: &str = "begin; set local lock_timeout = '100ms'; set local statement_timeout = '10s'";
/// Statements of one step that may time out on a lock: for a tenant found to be blocked, for one already known to be,
/// and for all together.
const WAITS_TENANT_MAX: usize = 12;
const WAITS_AGAIN_MAX: usize = 2;
const WAITS_MAX: usize = 60;
/// These events wait until the tenant's quota admits them.
const QUOTA_REFUSALS: [&str; 2] = ["PR429", "PR507"];
/// The tenant lives elsewhere, as far as this database knows: nothing is wrong with its events.
const OTHER_CELL: &str = "PR421";
/// Types of the events that Postrider itself emits.
const RESERVED: &str = "postrider.";

#[derive(Debug)]
pub(super) struct Row {
    pub(super) n: i64,
    pub(super) tenant: String,
    pub(super) r#type: String,
    pub(super) data: String,
    pub(super) id: String,
    pub(super) version: Option<String>,
    pub(super) ordering_key: Option<String>,
    /// Of a trace.
    pub(super) context: Option<Vec<u8>>,
}

impl Row {
    fn strand(&self) -> Strand {
        match &self.ordering_key {
            Some(key) => Strand::Key(key.clone()),
            None => Strand::Row(self.n),
        }
    }
}

/// This database's rejection of an event.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) n: i64,
    pub(super) refusal: String,
    pub(super) field: Option<String>,
    pub(super) message: String,
}

/// Events to remove from the outbox.
#[derive(Debug, Default)]
pub(super) struct Processed {
    /// Including rejected ones.
    pub(super) rows: Vec<i64>,
    pub(super) refused: Vec<Refused>,
    /// Tenants whose events wait for a quota, with the refusal.
    pub(super) over_quota: BTreeMap<String, String>,
}

/// Any number of events, in their order.
pub(super) async fn emit_page(
    pool: &PgPool,
    rows: &[Row],
    aside: &mut Aside,
    processed: &mut Processed,
) -> Result<(), sqlx::Error> {
    let rows: Vec<&Row> = rows.iter().collect();
    if rows.len() > PART_MAX && emit(pool, &rows, aside, processed).await? {
        return Ok(());
    }
    let mut blocked: BTreeSet<&str> = BTreeSet::new();
    for part in rows.chunks(PART_MAX) {
        let open: Vec<&Row> = part
            .iter()
            .copied()
            .filter(|row| !blocked.contains(row.tenant.as_str()))
            .collect();
        let before = processed.rows.len();
        emit_unblocked(pool, &open, aside, processed).await?;
        let done: BTreeSet<i64> = processed.rows[before..].iter().copied().collect();
        let left = open.into_iter().filter(|row| !done.contains(&row.n));
        blocked.extend(left.map(|row| row.tenant.as_str()));
    }
    Ok(())
}

/// All in one statement; if that is blocked, one per tenant, and for a blocked tenant in ever smaller parts.
async fn emit_unblocked(
    pool: &PgPool,
    rows: &[&Row],
    aside: &mut Aside,
    processed: &mut Processed,
) -> Result<(), sqlx::Error> {
    if rows.is_empty() || emit(pool, rows, aside, processed).await? {
        return Ok(());
    }
    let mut by_tenant: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        by_tenant.entry(&row.tenant).or_default().push(row);
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

/// Commits the events in this database and collects rejected ones. Returns false when they are blocked.
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
    let mut kept: BTreeMap<i64, Refused> = BTreeMap::new();
    for one in refused {
        match one.waits() {
            true => drop(kept.insert(one.n, one)),
            false => processed.refused.push(one),
        }
    }
    for row in rows {
        match kept.get(&row.n) {
            Some(one) => {
                aside.put_whole(&row.tenant, Instant::now());
                if QUOTA_REFUSALS.contains(&one.refusal.as_str()) {
                    processed
                        .over_quota
                        .insert(row.tenant.clone(), one.refusal.clone());
                }
            }
            None => {
                aside.forget(&row.tenant, &row.strand());
                processed.rows.push(row.n);
            }
        }
    }
    Ok(true)
}

impl Refused {
    /// The event stays in the outbox.
    fn waits(&self) -> bool {
        self.refusal == OTHER_CELL || QUOTA_REFUSALS.contains(&self.refusal.as_str())
    }
}

/// A lock timeout or any other error specific to these rows: not the server, the connection or the schema.
fn is_about_rows(error: &sqlx::Error) -> bool {
    const CLASSES: [&str; 8] = ["21", "22", "23", "40", "54", "55", "P0", "PR"];
    const STATEMENT_TIMEOUT: &str = "57014";
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| code == STATEMENT_TIMEOUT || CLASSES.iter().any(|class| code.starts_with(class)))
}

async fn try_emit(pool: &PgPool, rows: &[&Row]) -> Result<Vec<Refused>, sqlx::Error> {
    let mut transaction = pool.begin_with(BEGIN_EMIT).await?;
    let (operational, ordinary): (Vec<&Row>, Vec<&Row>) =
        rows.iter().partition(|row| row.r#type.starts_with(RESERVED));
    let emitted = async {
        let mut refused = emit_ordinary(&mut transaction, &ordinary).await?;
        for row in operational {
            refused.extend(emit_operational(&mut transaction, row).await?);
        }
        Ok(refused)
    };
    match emitted.await {
        Ok(refused) => {
            transaction.commit().await?;
            Ok(refused)
        }
        Err(error) => {
            // Releases its locks before others are tried.
            transaction.rollback().await?;
            Err(error)
        }
    }
}

#[derive(FromRow)]
struct Emission {
    position: i32,
    refusal: Option<String>,
    field: Option<String>,
    message: Option<String>,
}

impl Emission {
    fn refused(self, n: i64) -> Option<Refused> {
        Some(Refused {
            n,
            refusal: self.refusal?,
            field: self.field,
            message: self.message.unwrap_or_default(),
        })
    }
}

async fn emit_ordinary(connection: &mut PgConnection, rows: &[&Row]) -> Result<Vec<Refused>, sqlx::Error> {
    fn column<'r>(rows: &[&'r Row], part: impl Fn(&'r Row) -> Option<&'r str>) -> Vec<Option<&'r str>> {
        rows.iter().map(|row| part(row)).collect()
    }
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let contexts: Vec<Option<&[u8]>> = rows.iter().map(|row| row.context.as_deref()).collect();
    let has_context = contexts.iter().any(Option::is_some);
    let results: Vec<Emission> = sqlx::query_as(
        "select position, refusal, field, message
         from postrider.emit_all($1, $2, $3, $4, $5, $6, contexts => $7)",
    )
    .bind(column(rows, |row| Some(&row.tenant)))
    .bind(column(rows, |row| Some(&row.r#type)))
    .bind(column(rows, |row| Some(&row.data)))
    .bind(column(rows, |row| Some(&row.id)))
    .bind(column(rows, |row| row.version.as_deref()))
    .bind(column(rows, |row| row.ordering_key.as_deref()))
    .bind(has_context.then_some(contexts))
    .fetch_all(connection)
    .await?;
    let refused = |result: Emission| {
        let row = rows.get(usize::try_from(result.position).ok()?)?;
        result.refused(row.n)
    };
    Ok(results.into_iter().filter_map(refused).collect())
}

/// An event that Postrider itself emitted, in another database.
pub(super) async fn emit_operational(
    connection: &mut PgConnection,
    row: &Row,
) -> Result<Option<Refused>, sqlx::Error> {
    let result: Emission = sqlx::query_as(
        "select position, refusal, field, message
         from postrider.emit_one($1, $2, $3, $4, $5, reserved => true)",
    )
    .bind(&row.tenant)
    .bind(&row.r#type)
    .bind(&row.data)
    .bind(&row.id)
    .bind(&row.version)
    .fetch_one(connection)
    .await?;
    Ok(result.refused(row.n))
}
