//! The relay of a producer's own database: moves what is committed in the outbox there into this one.
//! A restored copy takes nothing from an outbox: the events there belong to the installation it is a copy of. Every statement
//! has a server-side timeout, so that none is left behind.

use std::time::{Duration, Instant};

use sqlx::{Connection, FromRow, PgConnection, PgPool, Postgres, Transaction};

use super::{
    aside::Aside,
    batch::{Processed, Refused, Row, emit_page},
};
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

const BATCH_MAX: i64 = 200;
const IDLE_WAIT: Duration = Duration::from_millis(50);
/// While another dispatcher relays from the same source.
const OTHERS_WAIT: Duration = Duration::from_secs(1);
const AFTER_ERROR: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
const STEP_TIME_MAX: Duration = Duration::from_secs(60);
/// In the source, whose transaction stays open during the emit: longer than a step may take.
const BEGIN_STEP: &str = "begin; set local lock_timeout = '5s'; set local statement_timeout = '10s'; \
                          set local idle_in_transaction_session_timeout = '70s'";
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

/// Raw bytes from the source: an event that is not UTF-8 must not block the others.
#[derive(Debug, FromRow)]
struct Stored {
    n: i64,
    tenant: Vec<u8>,
    r#type: Vec<u8>,
    data: Vec<u8>,
    id: Vec<u8>,
    version: Option<Vec<u8>>,
    ordering_key: Option<Vec<u8>>,
}

impl Stored {
    fn read(self) -> Result<Row, std::string::FromUtf8Error> {
        Ok(Row {
            n: self.n,
            tenant: String::from_utf8(self.tenant)?,
            r#type: String::from_utf8(self.r#type)?,
            data: String::from_utf8(self.data)?,
            id: String::from_utf8(self.id)?,
            version: self.version.map(String::from_utf8).transpose()?,
            ordering_key: self.ordering_key.map(String::from_utf8).transpose()?,
            context: None,
        })
    }
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
                processed.refused.push(Refused {
                    n,
                    refusal,
                    field: None,
                    message,
                });
            }
        }
    }
    // The address of the main database may lead to another one by now.
    if !rows.is_empty() && sending::state(pool).await?.restored {
        return Ok(Step::Others);
    }
    emit_page(pool, &rows, aside, &mut processed).await?;
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
async fn page(source: &mut PgConnection, aside: &mut Aside) -> Result<Vec<Stored>, sqlx::Error> {
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

async fn remove(
    transaction: &mut Transaction<'_, Postgres>,
    Processed { rows, refused, .. }: &Processed,
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
