//! The partitions of events and attempts: created ahead of time, at startup and by an hourly duty. `retention.rs`
//! drops them.
//! Invariant: partitions cover every instant from now to weeks ahead, however short the retention, so that no emit
//! can fail because one is missing. After the last narrow partition comes a wide one, the net. It is normally empty
//! and is replaced as narrow ones are created. If that was not done for long, events are stored in the net, and old
//! ones in it are deleted row by row.

use std::time::Duration;

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Postgres, Transaction};

use crate::bind::BindAll;

/// The tables that are partitioned by time.
pub(crate) const TABLES: [&str; 2] = ["events", "attempts"];

/// Length of a partition. A day, unless the retention is so short that a day would be too coarse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Width {
    TenSeconds,
    Minute,
    Hour,
    Day,
    /// The one after all others. Begins anywhere.
    Net,
}

impl Width {
    /// Those that begin at a multiple of their length.
    const ALIGNED: [Self; 4] = [Self::TenSeconds, Self::Minute, Self::Hour, Self::Day];

    fn for_retention(retention: Duration) -> Self {
        match retention.as_secs() / 60 {
            0..10 => Self::TenSeconds,
            10..180 => Self::Minute,
            180..4_320 => Self::Hour,
            _ => Self::Day,
        }
    }

    /// Length in seconds, partitions created ahead, the next narrower width, and the format of names. A name does not
    /// contain the length of a net, which must therefore never change.
    const fn properties(self) -> (i64, usize, Self, &'static str) {
        match self {
            Self::TenSeconds => (10, 30, Self::TenSeconds, "%Y%m%d_%H%M%S"),
            Self::Minute => (60, 30, Self::TenSeconds, "%Y%m%d_%H%M"),
            Self::Hour => (3_600, 48, Self::Minute, "%Y%m%d_%H"),
            Self::Day => (86_400, 14, Self::Hour, "%Y%m%d"),
            Self::Net => (30 * 86_400, 1, Self::Day, "net_%Y%m%d_%H%M%S"),
        }
    }

    const fn seconds(self) -> i64 {
        self.properties().0
    }

    const fn ahead(self) -> usize {
        self.properties().1
    }

    const fn narrower(self) -> Self {
        self.properties().2
    }

    const fn format(self) -> &'static str {
        self.properties().3
    }
}

/// The time range of one partition, encoded in its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Slice {
    start: i64,
    width: Width,
}

impl Slice {
    fn at(time: DateTime<Utc>, width: Width) -> Self {
        let seconds = width.seconds();
        Self {
            start: time.timestamp().div_euclid(seconds) * seconds,
            width,
        }
    }

    fn net(begin: DateTime<Utc>) -> Self {
        Self {
            start: begin.timestamp(),
            width: Width::Net,
        }
    }

    pub(crate) fn is_net(self) -> bool {
        self.width == Width::Net
    }

    fn next(self) -> Self {
        Self {
            start: self.start + self.width.seconds(),
            ..self
        }
    }

    pub(crate) fn begin(self) -> DateTime<Utc> {
        DateTime::from_timestamp(self.start, 0).unwrap_or_default()
    }

    pub(crate) fn end(self) -> DateTime<Utc> {
        self.next().begin()
    }

    fn name(self) -> String {
        self.begin().format(self.width.format()).to_string()
    }

    /// Parses the part of a partition's name after its table's.
    fn parse(text: &str) -> Option<Self> {
        if text.starts_with("net_") {
            let begin = NaiveDateTime::parse_from_str(text, Width::Net.format()).ok()?;
            return Some(Self::net(begin.and_utc()));
        }
        let padded = match text.len() {
            8 => format!("{text}_000000"),
            11 => format!("{text}0000"),
            13 => format!("{text}00"),
            _ => text.to_owned(),
        };
        let time = NaiveDateTime::parse_from_str(&padded, Width::TenSeconds.format()).ok()?;
        Width::ALIGNED
            .into_iter()
            .map(|width| Self::at(time.and_utc(), width))
            .find(|slice| slice.name() == text)
    }

    fn overlaps(self, other: Self) -> bool {
        self.begin() < other.end() && other.begin() < self.end()
    }

    fn contains(self, other: Self) -> bool {
        self.begin() <= other.begin() && other.end() <= self.end()
    }

    /// The slices to create so that this one is covered, given existing ones.
    fn uncovered(self, existing: &[Self]) -> Vec<Self> {
        if existing.iter().any(|other| other.contains(self)) {
            return Vec::new();
        }
        if !existing.iter().any(|other| other.overlaps(self)) {
            return vec![self];
        }
        let parts = self.width.seconds() / self.width.narrower().seconds();
        let first = Self::at(self.begin(), self.width.narrower());
        std::iter::successors(Some(first), |slice| Some(slice.next()))
            .take(parts as usize)
            .flat_map(|slice| slice.uncovered(existing))
            .collect()
    }
}

/// A partition as the database has it.
#[derive(Debug, Clone)]
pub(crate) struct Partition {
    pub(crate) table: &'static str,
    pub(crate) slice: Slice,
    /// Detached, but the detach did not complete.
    pub(crate) pending: bool,
}

impl Partition {
    fn parse(table: &'static str, name: &str, pending: bool) -> Option<Self> {
        let slice = Slice::parse(name.strip_prefix(table)?.strip_prefix('_')?)?;
        Some(Self {
            table,
            slice,
            pending,
        })
    }

    /// Built only from a table's name and a time, so it is safe in SQL.
    pub(crate) fn name(&self) -> String {
        format!("postrider.{}_{}", self.table, self.slice.name())
    }
}

pub(crate) async fn attached(
    connection: &mut PgConnection,
    table: &'static str,
) -> Result<Vec<Partition>, sqlx::Error> {
    let rows: Vec<(String, bool)> = sqlx::query_as(
        "select c.relname::text, i.inhdetachpending
         from pg_inherits i join pg_class c on c.oid = i.inhrelid
         where i.inhparent = ('postrider.' || $1)::regclass",
    )
    .bind(table)
    .fetch_all(connection)
    .await?;
    let partition = |(name, pending): &(String, bool)| Partition::parse(table, name, *pending);
    let mut found: Vec<Partition> = rows.iter().filter_map(partition).collect();
    found.sort_unstable_by_key(|partition| partition.slice);
    Ok(found)
}

/// Detached but not dropped: the process was interrupted.
pub(crate) async fn detached(
    connection: &mut PgConnection,
    table: &'static str,
) -> Result<Vec<Partition>, sqlx::Error> {
    let names: Vec<String> = sqlx::query_scalar(
        "select c.relname::text from pg_class c
         where c.relnamespace = 'postrider'::regnamespace and c.relkind = 'r' and c.relname like $1 || '\\_%'
           and not exists (select from pg_inherits i where i.inhrelid = c.oid)",
    )
    .bind(table)
    .fetch_all(connection)
    .await?;
    let partition = |name: &String| Partition::parse(table, name, false);
    Ok(names.iter().filter_map(partition).collect())
}

/// Creates missing partitions up to the horizon. The one before now is for an emit that crosses its end.
pub async fn make_ahead(pool: &PgPool, retention: Duration) -> Result<(), sqlx::Error> {
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(pool)
        .await?;
    make_ahead_at(pool, retention, now).await
}

/// As of another time.
pub async fn make_ahead_at(
    pool: &PgPool,
    retention: Duration,
    now: DateTime<Utc>,
) -> Result<(), sqlx::Error> {
    let width = Width::for_retention(retention);
    for table in TABLES {
        let existing: Vec<Slice> = attached(&mut *pool.acquire().await?, table)
            .await?
            .iter()
            .map(|partition| partition.slice)
            .collect();
        let plan = Plan::new(&existing, width, now);
        for slice in plan.beside {
            make(pool, table, slice).await?;
        }
        let Some(net) = plan.net else {
            make(pool, table, plan.next_net).await?;
            continue;
        };
        if plan.instead.is_empty() {
            continue;
        }
        let new: Vec<Slice> = plan.instead.into_iter().chain([plan.next_net]).collect();
        match replace(pool, table, net, &new).await {
            // The net covers until then.
            Err(error) if is_busy(&error) => {
                tracing::info!(
                    table,
                    "creating partitions was blocked by an open transaction; retrying later"
                );
            }
            done => done?,
        }
    }
    Ok(())
}

/// Creates those that are missing from then to now, a day each, for events that come from another database.
pub(crate) async fn make_since(pool: &PgPool, since: DateTime<Utc>) -> Result<(), sqlx::Error> {
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(pool)
        .await?;
    for table in TABLES {
        let existing: Vec<Slice> = attached(&mut *pool.acquire().await?, table)
            .await?
            .iter()
            .map(|partition| partition.slice)
            .collect();
        let days = std::iter::successors(Some(Slice::at(since, Width::Day)), |slice| Some(slice.next()));
        for day in days.take_while(|day| day.begin() < now) {
            for slice in day.uncovered(&existing) {
                make(pool, table, slice).await?;
            }
        }
    }
    Ok(())
}

/// Partitions to create for one table.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    /// Where there is none yet.
    beside: Vec<Slice>,
    /// The empty net.
    net: Option<Slice>,
    /// Replacing a part of the net.
    instead: Vec<Slice>,
    /// After all others.
    next_net: Slice,
}

impl Plan {
    fn new(existing: &[Slice], width: Width, now: DateTime<Utc>) -> Self {
        let unused = |slice: &&Slice| slice.is_net() && slice.begin() > now;
        let net = existing.iter().filter(unused).max().copied();
        let mut covered: Vec<Slice> = existing
            .iter()
            .copied()
            .filter(|slice| Some(*slice) != net)
            .collect();
        let mut missing = Vec::new();
        let first = Slice::at(now - TimeDelta::seconds(width.seconds()), width);
        let wanted = std::iter::successors(Some(first), |slice| Some(slice.next()));
        for slice in wanted.take(width.ahead() + 2) {
            let pieces = slice.uncovered(&covered);
            covered.extend(&pieces);
            missing.extend(pieces);
        }
        let end = covered.iter().map(|slice| slice.end()).max().unwrap_or(now);
        let (instead, beside) = missing
            .into_iter()
            .partition(|slice: &Slice| net.is_some_and(|net| net.overlaps(*slice)));
        Self {
            beside,
            net,
            instead,
            next_net: Slice::net(end),
        }
    }
}

/// Created separately and attached afterwards: `create … partition of` would queue every emit behind an open
/// producer.
async fn make(pool: &PgPool, table: &'static str, slice: Slice) -> Result<(), sqlx::Error> {
    let mut tx = begin(pool, "1s").await?;
    if !exists(&mut tx, table, slice).await? {
        create(&mut tx, table, slice).await?;
        attach(&mut tx, table, slice).await?;
    }
    tx.commit().await
}

/// Replaces a part of the net by narrow partitions, in one transaction that blocks emits while it locks the table:
/// some milliseconds. If a producer's transaction is open, it waits a moment, emits wait with it, and it fails.
async fn replace(pool: &PgPool, table: &'static str, net: Slice, new: &[Slice]) -> Result<(), sqlx::Error> {
    let mut tx = begin(pool, "100ms").await?;
    // Another process may have done it just now.
    if !is_attached(&mut tx, table, net).await? {
        return Ok(());
    }
    for slice in new {
        if exists(&mut tx, table, *slice).await? {
            return Ok(());
        }
        create(&mut tx, table, *slice).await?;
    }
    let name = name_of(table, net);
    let detach = format!("alter table postrider.{table} detach partition postrider.{name}");
    execute(&mut tx, detach).await?;
    let used = AssertSqlSafe(format!("select exists (select from postrider.{name})"));
    if sqlx::query_scalar(used).fetch_one(&mut *tx).await? {
        // A clock was ahead. The net stays as it is.
        return Ok(());
    }
    execute(&mut tx, format!("drop table postrider.{name}")).await?;
    for slice in new {
        attach(&mut tx, table, *slice).await?;
    }
    tx.commit().await
}

/// A lock could not be acquired.
fn is_busy(error: &sqlx::Error) -> bool {
    const CODES: [&str; 3] = ["55P03", "40P01", "57014"];
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| CODES.contains(&&*code))
}

/// Two processes may be here at once.
async fn begin(
    pool: &PgPool,
    lock_timeout: &'static str,
) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
    let mut tx = pool
        .begin_with("begin; set local statement_timeout = '10s'")
        .await?;
    sqlx::query("select pg_advisory_xact_lock(hashtext('postrider.partitions'))")
        .execute(&mut *tx)
        .await?;
    sqlx::query("select set_config('lock_timeout', $1, true)")
        .bind(lock_timeout)
        .execute(&mut *tx)
        .await?;
    Ok(tx)
}

// The statements below are built only from a table's name, a time and two UUIDs.

fn name_of(table: &str, slice: Slice) -> String {
    format!("{table}_{}", slice.name())
}

async fn exists(tx: &mut PgConnection, table: &str, slice: Slice) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select to_regclass('postrider.' || $1) is not null")
        .bind(name_of(table, slice))
        .fetch_one(tx)
        .await
}

async fn is_attached(tx: &mut PgConnection, table: &str, slice: Slice) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "select exists (select from pg_inherits where inhrelid = to_regclass('postrider.' || $1))",
    )
    .bind(name_of(table, slice))
    .fetch_one(tx)
    .await
}

async fn create(tx: &mut PgConnection, table: &str, slice: Slice) -> Result<(), sqlx::Error> {
    let name = name_of(table, slice);
    execute(
        tx,
        format!("create table postrider.{name} (like postrider.{table} including all)"),
    )
    .await
}

async fn attach(tx: &mut PgConnection, table: &str, slice: Slice) -> Result<(), sqlx::Error> {
    let (from, to): (String, String) =
        sqlx::query_as("select postrider.uuid_floor($1)::text, postrider.uuid_floor($2)::text")
            .bind_all((slice.begin(), slice.end()))
            .fetch_one(&mut *tx)
            .await?;
    let name = name_of(table, slice);
    let attach = format!(
        "alter table postrider.{table} attach partition postrider.{name} for values from ('{from}') to ('{to}')"
    );
    execute(tx, attach).await
}

pub(crate) async fn execute(db: &mut PgConnection, statement: String) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(db).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(name: &str) -> Slice {
        Slice::parse(name).unwrap_or_else(|| panic!("{name}"))
    }

    #[test]
    fn a_partition_s_name_says_its_time() {
        for name in [
            "20260528",
            "20260528_07",
            "20260528_0759",
            "20260528_075950",
            "net_20260528_075951",
        ] {
            assert_eq!(slice(name).name(), name);
        }
        assert_eq!(slice("20261231").end(), slice("20270101_00").begin());
        for bad in [
            "",
            "held",
            "2026052",
            "20261340",
            "20260528_99",
            "20260528_07591",
            "20260528_075951",
            "net_20260528",
        ] {
            assert_eq!(Slice::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_stands_is_not_made_again_and_gaps_are_filled() {
        let day = slice("20260528");
        assert_eq!(day.uncovered(&[]), [day]);
        assert_eq!(day.uncovered(&[slice("20260527"), slice("20260529")]), [day]);
        assert_eq!(slice("20260528_0759").uncovered(&[day]), []);
        let hours = day.uncovered(&[slice("20260528_05")]);
        assert_eq!(hours.len(), 23);
        let minutes = day.uncovered(&[slice("20260528_0500")]);
        assert_eq!(minutes.len(), 23 + 59, "hours, and the minutes of one");
        assert!(minutes.iter().all(|made| !made.overlaps(slice("20260528_0500"))));
    }

    /// As often as it is due, for two days, and then once after months.
    #[test]
    fn there_is_a_partition_for_every_instant_weeks_ahead() {
        for width in Width::ALIGNED {
            let begin = slice("20260528_075950").begin();
            let mut existing: Vec<Slice> = Vec::new();
            let every = TimeDelta::seconds(width.seconds().min(3_600));
            let regular = (0..200).map(|n| begin + every * n);
            for now in regular.chain([begin + TimeDelta::days(10), begin + TimeDelta::days(12)]) {
                let plan = Plan::new(&existing, width, now);
                let made: Vec<Slice> = plan.beside.iter().chain(&plan.instead).copied().collect();
                if !plan.instead.is_empty() || plan.net.is_none() {
                    existing.retain(|slice| Some(*slice) != plan.net);
                    existing.push(plan.next_net);
                }
                existing.extend(made);
                existing.sort_unstable();
                assert!(
                    existing
                        .iter()
                        .all(|one| existing.iter().filter(|other| other.overlaps(*one)).count() == 1),
                    "{width:?} at {now}: none overlap"
                );
                let mut reached = now;
                for slice in &existing {
                    if slice.begin() <= reached && slice.end() > reached {
                        reached = slice.end();
                    }
                }
                assert!(
                    reached - now > TimeDelta::days(14),
                    "{width:?} at {now}: to {reached}"
                );
            }
        }
    }

    #[test]
    fn the_less_is_kept_the_narrower_they_are() {
        let hours = |hours: u64| Width::for_retention(Duration::from_secs(hours * 3_600));
        assert_eq!(
            [hours(1), hours(24), hours(720)],
            [Width::Minute, Width::Hour, Width::Day]
        );
    }
}
