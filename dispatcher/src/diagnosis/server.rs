//! The database server: version, settings, rights, and how it copes.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Connection, PgConnection};

use super::{Finding, STATEMENT_TIMEOUT, counted};
use crate::{connector::Connector, db_timeout::within};

const VERSION_MIN: i32 = 140_000;
const CLOCK_WARNING: TimeDelta = TimeDelta::seconds(1);
const CLOCK_ERROR: TimeDelta = TimeDelta::seconds(30);
const TRANSACTION_WARNING_SECONDS: f64 = 300.0;
const TRANSACTION_ERROR_SECONDS: f64 = 3_600.0;
const LAG_WARNING_SECONDS: f64 = 30.0;
const WAL_KEPT_WARNING_BYTES: i64 = 4 << 30;
/// Dead rows of a table that autovacuum should have removed.
const DEAD_ROWS_WARNING: i64 = 100_000;
const REPLICA_TIME_MAX: Duration = Duration::from_secs(5);

pub(super) async fn version(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.version";
    let (number, name): (i32, String) = sqlx::query_as(
        "select current_setting('server_version_num')::int, current_setting('server_version')",
    )
    .fetch_one(db)
    .await?;
    Ok(match number >= VERSION_MIN {
        true => Finding::ok(CHECK, format!("Postgres {name}")),
        false => Finding::error(
            CHECK,
            format!("Postgres {name}"),
            "Upgrade to Postgres 14 or newer.",
        ),
    })
}

pub(super) async fn durability(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.durability";
    let off: Vec<String> = sqlx::query_scalar(
        "select name || ' = ' || setting from pg_settings
         where (name in ('fsync', 'full_page_writes') and setting <> 'on')
            or (name = 'synchronous_commit' and setting = 'off')
            or (name = 'server_encoding' and setting <> 'UTF8')
         order by name",
    )
    .fetch_all(db)
    .await?;
    Ok(match off.is_empty() {
        true => Finding::ok(CHECK, "an acknowledged commit is on disk"),
        false => Finding::error(
            CHECK,
            off.join(", "),
            "A crash could lose acknowledged events. Change the setting.",
        ),
    })
}

/// Everything can be read from a read-only database, and nothing is accepted or sent.
pub(super) async fn writes(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.writes";
    let (read_only, recovery, source): (bool, bool, String) = sqlx::query_as(
        "select current_setting('transaction_read_only')::boolean, pg_is_in_recovery(), source from pg_settings
         where name = 'default_transaction_read_only'",
    )
    .fetch_one(db)
    .await?;
    Ok(match (read_only, recovery) {
        (false, _) => Finding::ok(CHECK, "the database can be written to"),
        (true, true) => Finding::error(
            CHECK,
            "the database is read-only: this is a standby",
            "Connect to the primary: add target_session_attrs=read-write to the database URL.",
        ),
        (true, false) => Finding::error(
            CHECK,
            format!("the database is read-only: default_transaction_read_only is on (set by: {source})"),
            "Check that the disk is not full and that this is the right server. Then `alter database … reset \
             default_transaction_read_only`, or the same with `alter role` or `alter system`, wherever it is set.",
        ),
    })
}

pub(super) async fn connections(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.connections";
    let (used, most): (i64, i32) = sqlx::query_as(
        "select count(*), current_setting('max_connections')::int from pg_stat_activity
         where backend_type = 'client backend'",
    )
    .fetch_one(db)
    .await?;
    let found = format!("{used} of {most}");
    Ok(match used * 5 < i64::from(most) * 4 {
        true => Finding::ok(CHECK, found),
        false => Finding::warning(
            CHECK,
            found,
            "Raise max_connections, or use PgBouncer for dashboards and producers.",
        ),
    })
}

/// This machine's clock may be off without harm: due times and signatures follow the database's. But certificates are checked
/// by it, and logs can't be compared.
#[expect(clippy::disallowed_methods, reason = "it is this clock that is checked")]
pub(super) async fn clock(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.clock";
    let (before, asked) = (Utc::now(), Instant::now());
    let there: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(db)
        .await?;
    let half = TimeDelta::from_std(asked.elapsed() / 2).unwrap_or_default();
    let offset = (there - (before + half)).abs();
    let found = format!("{} ms apart from this machine's", offset.num_milliseconds());
    let advice = "Synchronise both clocks with NTP. Signatures carry the database's time, and receivers reject old ones.";
    Ok(match offset {
        offset if offset >= CLOCK_ERROR => Finding::error(CHECK, found, advice),
        offset if offset >= CLOCK_WARNING => Finding::warning(CHECK, found, advice),
        _ => Finding::ok(CHECK, found),
    })
}

pub(super) async fn autovacuum(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.autovacuum";
    // Dispatchers vacuum what they use up, if they may.
    let (on, nap, is_owner): (bool, i32, bool) = sqlx::query_as(
        "select current_setting('autovacuum')::boolean,
                (select setting::int from pg_settings where name = 'autovacuum_naptime'),
                (select pg_has_role(relowner, 'usage') from pg_class where oid = 'postrider.queue'::regclass)",
    )
    .fetch_one(db)
    .await?;
    Ok(match (on, nap) {
        (false, _) => Finding::error(CHECK, "off", "Turn it on: dead rows would pile up."),
        (true, 16..) if !is_owner => Finding::warning(
            CHECK,
            format!("on, every {nap} s"),
            "Set autovacuum_naptime to 5s, or run the dispatchers as the owner of the tables, who may vacuum them: dead rows \
             of the queue pile up between two runs.",
        ),
        (true, _) => Finding::ok(CHECK, format!("on, every {nap} s")),
    })
}

pub(super) async fn dead_rows(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.dead_rows";
    let tables: Vec<String> = sqlx::query_scalar(
        "select format('%s: %s dead and %s live rows', s.relname, s.n_dead_tup, s.n_live_tup)
         from pg_stat_user_tables s
         where s.schemaname = 'postrider' and s.n_dead_tup > $1 and s.n_dead_tup > s.n_live_tup
         order by s.n_dead_tup desc limit 5",
    )
    .bind(DEAD_ROWS_WARNING)
    .fetch_all(db)
    .await?;
    Ok(match tables.is_empty() {
        true => Finding::ok(CHECK, "few"),
        false => Finding::warning(
            CHECK,
            tables.join("; "),
            "End long transactions, and check that autovacuum keeps up.",
        ),
    })
}

/// Old snapshots keep dead rows from being removed.
pub(super) async fn transactions(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.transactions";
    let (oldest, pid, application, prepared): (Option<f64>, Option<i32>, Option<String>, i64) = sqlx::query_as(
        "select extract(epoch from clock_timestamp() - a.xact_start)::float8, a.pid, a.application_name,
                (select count(*) from pg_prepared_xacts where prepared < clock_timestamp() - interval '5 minutes')
         from (select 1) one
         left join lateral (
             select xact_start, pid, application_name from pg_stat_activity
             where xact_start is not null and pid <> pg_backend_pid() and backend_type = 'client backend'
             order by xact_start limit 1
         ) a on true",
    )
    .fetch_one(db)
    .await?;
    let seconds = oldest.unwrap_or(0.0);
    let left_over = match prepared {
        0 => String::new(),
        _ => format!(
            "; {} left over",
            counted(prepared, "prepared transaction is", "prepared transactions are")
        ),
    };
    let (found, impersonal) = match pid {
        None => {
            let found = format!("none is open{left_over}");
            (found.clone(), found)
        }
        Some(pid) => {
            let (age, application) = (
                format!("the oldest is {seconds:.0} s old"),
                application.unwrap_or_default(),
            );
            (
                format!("{age} (pid {pid}, {application}){left_over}"),
                format!("{age} (pid {pid}){left_over}"),
            )
        }
    };
    let advice =
        "End it, or set idle_in_transaction_session_timeout: while it is open, dead rows can't be removed.";
    let finding = if seconds >= TRANSACTION_ERROR_SECONDS {
        Finding::error(CHECK, found, advice)
    } else if seconds >= TRANSACTION_WARNING_SECONDS || prepared > 0 {
        Finding::warning(CHECK, found, advice)
    } else {
        Finding::ok(CHECK, found)
    };
    Ok(finding.in_bundles(impersonal))
}

/// Standbys, and slots that keep WAL. Lags are visible to members of `pg_monitor` only.
pub(super) async fn replication(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.replication";
    let (recovery, standbys, lag, kept): (bool, i64, Option<f64>, Option<i64>) = sqlx::query_as(
        "select pg_is_in_recovery(), (select count(*) from pg_stat_replication),
                (select extract(epoch from max(replay_lag))::float8 from pg_stat_replication),
                case when not pg_is_in_recovery() then
                    (select max(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn))::bigint from pg_replication_slots
                     where not active) end",
    )
    .fetch_one(db)
    .await?;
    if recovery {
        let advice = "Connect to the primary: add target_session_attrs=read-write to the database URL.";
        return Ok(Finding::error(CHECK, "this is a read-only standby", advice));
    }
    let mut found = counted(standbys, "standby is connected", "standbys are connected");
    if let Some(lag) = lag {
        found += &format!(", {lag:.0} s behind");
    }
    if let Some(kept) = kept.filter(|kept| *kept > WAL_KEPT_WARNING_BYTES) {
        let advice = "Drop the replication slot, or bring its standby back: WAL fills the disk.";
        let found = format!(
            "{found}; a slot that is not in use keeps {} MiB of WAL",
            kept >> 20
        );
        return Ok(Finding::warning(CHECK, found, advice));
    }
    Ok(match lag {
        Some(lag) if lag >= LAG_WARNING_SECONDS => Finding::warning(
            CHECK,
            found,
            "Events not replicated yet are lost if the primary fails now. Check the standby's disk and network.",
        ),
        _ => Finding::ok(CHECK, found),
    })
}

/// `POSTRIDER_DATABASE_URL_READ`.
pub(super) async fn read_replica(replica: &Connector) -> Finding {
    const CHECK: &str = "database.read_replica";
    let advice = "Pages are read from the primary meanwhile. Check POSTRIDER_DATABASE_URL_READ.";
    let replica = replica.with(|options| options.options([STATEMENT_TIMEOUT]));
    let asked = async {
        let mut connection = replica.connect().await?;
        let lag: Option<f64> = sqlx::query_scalar(
            "select case when pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn() then 0
                         else extract(epoch from clock_timestamp() - pg_last_xact_replay_timestamp())::float8 end
             where pg_is_in_recovery()",
        )
        .fetch_optional(&mut connection)
        .await?;
        connection.close().await?;
        Ok(lag)
    };
    match within(REPLICA_TIME_MAX, asked).await {
        Err(error) => Finding::warning(CHECK, error.to_string(), advice),
        Ok(None) => Finding::warning(CHECK, "it is not a standby", advice),
        Ok(Some(lag)) if lag >= LAG_WARNING_SECONDS => {
            Finding::warning(CHECK, format!("{lag:.0} s behind"), advice)
        }
        Ok(Some(lag)) => Finding::ok(CHECK, format!("{lag:.0} s behind")),
    }
}

pub(super) async fn rights(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "database.rights";
    let (superuser, may_create, refused): (bool, bool, Vec<String>) = sqlx::query_as(
        "select (select rolsuper from pg_roles where rolname = current_user),
                has_database_privilege(current_database(), 'create'),
                array(select c.relname::text from pg_class c
                      where c.relnamespace = 'postrider'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
                        and not (has_table_privilege(c.oid, 'select') and has_table_privilege(c.oid, 'insert')
                                 and has_table_privilege(c.oid, 'update') and has_table_privilege(c.oid, 'delete'))
                      order by 1)",
    )
    .fetch_one(db)
    .await?;
    Ok(if !refused.is_empty() {
        let advice = "Use the role that owns the schema, or grant it the rights.";
        Finding::error(
            CHECK,
            format!("this role may not write: {}", refused.join(", ")),
            advice,
        )
    } else if superuser {
        let advice = "Use a role that owns the database and is no superuser.";
        Finding::warning(CHECK, "this role is a superuser", advice)
    } else if !may_create {
        let advice = "`postrider migrate` needs the right: grant create on database.";
        Finding::warning(CHECK, "this role may not create schemas in the database", advice)
    } else {
        Finding::ok(CHECK, "this role may do what it needs, and is no superuser")
    })
}
