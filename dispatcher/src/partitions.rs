//! The partitions of events and attempts: made ahead of time, at the start and by an hourly duty. `retention.rs` drops them.
//! Invariant: a partition for every instant from now to the horizon exists, so that no emit can fail for want of one.

use std::time::Duration;

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use sqlx::{AssertSqlSafe, FromRow, PgConnection, PgPool};

/// The tables that are divided by time.
pub(crate) const TABLES: [&str; 2] = ["events", "attempts"];

/// How long one partition is. Days, unless so little is kept that a day would be too coarse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Width {
    TenSeconds,
    Minute,
    Hour,
    Day,
}

impl Width {
    const ALL: [Self; 4] = [Self::TenSeconds, Self::Minute, Self::Hour, Self::Day];

    fn for_retention(retention: Duration) -> Self {
        match retention.as_secs() / 60 {
            0..10 => Self::TenSeconds,
            10..180 => Self::Minute,
            180..4_320 => Self::Hour,
            _ => Self::Day,
        }
    }

    const fn seconds(self) -> i64 {
        match self {
            Self::TenSeconds => 10,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => 86_400,
        }
    }

    /// Partitions that are made ahead.
    const fn ahead(self) -> i64 {
        match self {
            Self::TenSeconds => 30,
            Self::Minute => 30,
            Self::Hour => 48,
            Self::Day => 14,
        }
    }

    const fn narrower(self) -> Self {
        match self {
            Self::TenSeconds | Self::Minute => Self::TenSeconds,
            Self::Hour => Self::Minute,
            Self::Day => Self::Hour,
        }
    }

    const fn format(self) -> &'static str {
        match self {
            Self::TenSeconds => "%Y%m%d_%H%M%S",
            Self::Minute => "%Y%m%d_%H%M",
            Self::Hour => "%Y%m%d_%H",
            Self::Day => "%Y%m%d",
        }
    }
}

/// The time that one partition is for. Its name says it.
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

    /// Of the part of a partition's name behind its table's.
    fn parse(text: &str) -> Option<Self> {
        let padded = match text.len() {
            8 => format!("{text}_000000"),
            11 => format!("{text}0000"),
            13 => format!("{text}00"),
            _ => text.to_owned(),
        };
        let time = NaiveDateTime::parse_from_str(&padded, Width::TenSeconds.format()).ok()?;
        Width::ALL
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

    /// What has to be made so that this one is covered, where others stand already.
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
    /// Cut off, but the cutting did not come to its end.
    pub(crate) pending: bool,
}

impl Partition {
    /// Every part of it is made here: a table's name and a time.
    pub(crate) fn name(&self) -> String {
        format!("postrider.{}_{}", self.table, self.slice.name())
    }
}

pub(crate) async fn attached(
    connection: &mut PgConnection,
    table: &'static str,
) -> Result<Vec<Partition>, sqlx::Error> {
    #[derive(FromRow)]
    struct Row {
        name: String,
        pending: bool,
    }
    let rows: Vec<Row> = sqlx::query_as(
        "select c.relname::text as name, i.inhdetachpending as pending
         from pg_inherits i join pg_class c on c.oid = i.inhrelid
         where i.inhparent = ('postrider.' || $1)::regclass",
    )
    .bind(table)
    .fetch_all(connection)
    .await?;
    let mut found: Vec<Partition> = rows
        .into_iter()
        .filter_map(|row| {
            let slice = Slice::parse(row.name.strip_prefix(table)?.strip_prefix('_')?)?;
            Some(Partition {
                table,
                slice,
                pending: row.pending,
            })
        })
        .collect();
    found.sort_unstable_by_key(|partition| partition.slice);
    Ok(found)
}

/// Cut off from their table, but not dropped: whoever did it was interrupted.
pub(crate) async fn cut_off(
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
    let slice = |name: &String| Slice::parse(name.strip_prefix(table)?.strip_prefix('_')?);
    Ok(names
        .iter()
        .filter_map(slice)
        .map(|slice| Partition {
            table,
            slice,
            pending: false,
        })
        .collect())
}

/// Makes what is missing up to the horizon. The one before now is for an emit that crosses its end.
pub async fn make_ahead(pool: &PgPool, retention: Duration) -> Result<(), sqlx::Error> {
    let mut connection = pool.acquire().await?;
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(&mut *connection)
        .await?;
    let width = Width::for_retention(retention);
    let first = Slice::at(now - TimeDelta::seconds(width.seconds()), width);
    for table in TABLES {
        let mut existing: Vec<Slice> = attached(&mut connection, table)
            .await?
            .iter()
            .map(|partition| partition.slice)
            .collect();
        let wanted = std::iter::successors(Some(first), |slice| Some(slice.next()));
        for slice in wanted.take(width.ahead() as usize + 2) {
            for missing in slice.uncovered(&existing) {
                make(pool, table, missing).await?;
                existing.push(missing);
            }
        }
    }
    Ok(())
}

/// Created alone and attached afterwards: `create … partition of` would queue every emit behind an open producer.
async fn make(pool: &PgPool, table: &'static str, slice: Slice) -> Result<(), sqlx::Error> {
    let (from, to): (String, String) =
        sqlx::query_as("select postrider.uuid_floor($1)::text, postrider.uuid_floor($2)::text")
            .bind(slice.begin())
            .bind(slice.end())
            .fetch_one(pool)
            .await?;
    let name = format!("{table}_{}", slice.name());
    let mut tx = pool.begin().await?;
    sqlx::query("set local lock_timeout = '1s'")
        .execute(&mut *tx)
        .await?;
    // Two processes may be here at once.
    sqlx::query("select pg_advisory_xact_lock(hashtext('postrider.partitions'))")
        .execute(&mut *tx)
        .await?;
    let exists: bool = sqlx::query_scalar("select to_regclass('postrider.' || $1) is not null")
        .bind(&name)
        .fetch_one(&mut *tx)
        .await?;
    // Every part of these statements is made here: a table's name, a time and two uuids.
    if !exists {
        let create = format!("create table postrider.{name} (like postrider.{table} including all)");
        sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut *tx).await?;
        let attach = format!(
            "alter table postrider.{table} attach partition postrider.{name} for values from ('{from}') to ('{to}')"
        );
        sqlx::raw_sql(AssertSqlSafe(attach)).execute(&mut *tx).await?;
    }
    tx.commit().await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(name: &str) -> Slice {
        Slice::parse(name).unwrap_or_else(|| panic!("{name}"))
    }

    #[test]
    fn a_partition_s_name_says_its_time() {
        for name in ["20260528", "20260528_07", "20260528_0759", "20260528_075950"] {
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

    #[test]
    fn the_less_is_kept_the_narrower_they_are() {
        let hours = |hours: u64| Width::for_retention(Duration::from_secs(hours * 3_600));
        assert_eq!(
            [hours(1), hours(24), hours(720)],
            [Width::Minute, Width::Hour, Width::Day]
        );
    }
}
