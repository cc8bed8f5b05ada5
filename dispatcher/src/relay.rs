//! The relay: moves committed events from producers' own databases into the main one.
//! Invariant: an event is emitted here before it is removed there, and its id was fixed there. So a crash between the
//! two emits it again under the same id with the same content, which does nothing: exactly once, whichever side dies.

use std::time::Duration;

use sqlx::{
    Connection, FromRow, PgConnection, PgPool, Postgres, Transaction, migrate::Migrator,
    postgres::PgConnectOptions,
};
use tokio_util::sync::CancellationToken;

use crate::{Wake, meters::METERS, schema::SchemaError};

const BATCH_MAX: i64 = 200;
const IDLE_WAIT: Duration = Duration::from_millis(50);
/// While another dispatcher relays from the same source.
const OTHERS_WAIT: Duration = Duration::from_secs(1);
const ERROR_WAIT_MIN: Duration = Duration::from_millis(200);
const ERROR_WAIT_MAX: Duration = Duration::from_secs(10);
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
const STEP_TIME_MAX: Duration = Duration::from_secs(60);
/// One relay at a time takes from a source, so that the events of a key stay in order.
const RELAY_LOCK: i64 = 0x706f_7374_7269_6465;

fn migrator() -> Migrator {
    let mut migrator = sqlx::migrate!("../migrations/outbox");
    migrator.create_schema("postrider");
    migrator.dangerous_set_table_name("postrider.outbox_migrations");
    migrator
}

/// Puts the outbox into a producer's own database.
pub async fn migrate_outbox(options: &PgConnectOptions) -> Result<(), SchemaError> {
    let mut connection = PgConnection::connect_with(options).await?;
    let is_main: bool = sqlx::query_scalar("select to_regclass('postrider.events') is not null")
        .fetch_one(&mut connection)
        .await?;
    if is_main {
        return Err(SchemaError::NotAnOutbox);
    }
    sqlx::query("set lock_timeout = '5s'")
        .execute(&mut connection)
        .await?;
    migrator().run(&mut connection).await?;
    connection.close().await?;
    Ok(())
}

/// Relays from one source until told to stop.
pub(crate) async fn run(
    number: usize,
    source: PgConnectOptions,
    pool: PgPool,
    wake: Wake,
    stop: CancellationToken,
) {
    let mut wait = ERROR_WAIT_MIN;
    while !stop.is_cancelled() {
        let relayed = tokio::select! {
            relayed = relay(&source, &pool, &wake, &mut wait) => relayed,
            () = stop.cancelled() => return,
        };
        if let Err(error) = relayed {
            // The URL has a password in it: the source is told by its place in the list.
            tracing::warn!(source = number, %error, "nothing can be relayed from a source; trying again");
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = stop.cancelled() => return,
        }
        wait = (wait * 2).min(ERROR_WAIT_MAX);
    }
}

async fn relay(
    source: &PgConnectOptions,
    pool: &PgPool,
    wake: &Wake,
    wait: &mut Duration,
) -> Result<(), sqlx::Error> {
    let too_long = |_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into());
    let connecting = PgConnection::connect_with(source);
    let mut connection = tokio::time::timeout(CONNECT_TIME_MAX, connecting)
        .await
        .map_err(too_long)??;
    loop {
        let step = step(&mut connection, pool);
        let step = tokio::time::timeout(STEP_TIME_MAX, step)
            .await
            .map_err(too_long)??;
        *wait = ERROR_WAIT_MIN;
        match step {
            Step::Moved => wake.now(),
            Step::Nothing => tokio::time::sleep(IDLE_WAIT).await,
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
struct Row {
    n: i64,
    tenant: String,
    r#type: String,
    data: String,
    id: String,
    version: Option<String>,
    ordering_key: Option<String>,
}

/// What the main database says of one of them.
struct Refused {
    n: i64,
    refusal: String,
    message: String,
}

async fn step(source: &mut PgConnection, pool: &PgPool) -> Result<Step, sqlx::Error> {
    let mut transaction = source.begin().await?;
    let ours: bool = sqlx::query_scalar("select pg_try_advisory_xact_lock($1)")
        .bind(RELAY_LOCK)
        .fetch_one(&mut *transaction)
        .await?;
    if !ours {
        return Ok(Step::Others);
    }
    let rows: Vec<Row> = sqlx::query_as(
        "select n, tenant, type, data, id, version, ordering_key from postrider.outbox order by n limit $1",
    )
    .bind(BATCH_MAX)
    .fetch_all(&mut *transaction)
    .await?;
    if rows.is_empty() {
        return Ok(Step::Nothing);
    }
    let refused = match emit(pool, &rows).await {
        // One that the whole batch fails on must not hold up the others.
        Err(sqlx::Error::Database(_)) if rows.len() > 1 => one_by_one(pool, &rows).await?,
        done => done?,
    };
    remove(&mut transaction, &rows, &refused).await?;
    transaction.commit().await?;
    METERS.relayed.increment((rows.len() - refused.len()) as u64);
    Ok(Step::Moved)
}

async fn one_by_one(pool: &PgPool, rows: &[Row]) -> Result<Vec<Refused>, sqlx::Error> {
    let mut refused = Vec::new();
    for row in rows {
        refused.extend(emit(pool, std::slice::from_ref(row)).await?);
    }
    Ok(refused)
}

/// Commits them in the main database and answers for those that it refused.
async fn emit(pool: &PgPool, rows: &[Row]) -> Result<Vec<Refused>, sqlx::Error> {
    let column = |part: fn(&Row) -> Option<&str>| rows.iter().map(part).collect::<Vec<_>>();
    let answers: Vec<(i32, Option<String>, Option<String>)> = sqlx::query_as(
        "select position, refusal, message from postrider.emit_all($1, $2, $3, $4, $5, $6, null)",
    )
    .bind(column(|row| Some(&row.tenant)))
    .bind(column(|row| Some(&row.r#type)))
    .bind(column(|row| Some(&row.data)))
    .bind(column(|row| Some(&row.id)))
    .bind(column(|row| row.version.as_deref()))
    .bind(column(|row| row.ordering_key.as_deref()))
    .fetch_all(pool)
    .await?;
    Ok(answers
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
    rows: &[Row],
    refused: &[Refused],
) -> Result<(), sqlx::Error> {
    if !refused.is_empty() {
        METERS.relay_refused.increment(refused.len() as u64);
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
        .bind(rows.iter().map(|row| row.n).collect::<Vec<_>>())
        .execute(&mut **transaction)
        .await?;
    Ok(())
}
