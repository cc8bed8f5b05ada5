//! A cycle in one statement, for times when little happens: nothing is requested, no settings have changed, and the few
//! new rows belong to known endpoints. Everything else is left to a whole cycle.

use sqlx::postgres::PgRow;

use super::{
    tail::{TailKey, TailRow, ranges},
    *,
};
use crate::bind::BindAll;

/// Rows that one statement reads.
const ROWS_MAX: i64 = 32;
/// With more ranges of transactions than this, the system is not quiet.
const RANGES_MAX: usize = 16;

struct QuickRow {
    snapshot: String,
    in_recovery: bool,
    now: DateTime<Utc>,
    has_changed_settings: bool,
    row: Option<TailRow>,
}

impl FromRow<'_, PgRow> for QuickRow {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let xid: Option<&str> = row.try_get("xid")?;
        Ok(Self {
            snapshot: row.try_get("snapshot")?,
            in_recovery: row.try_get("in_recovery")?,
            now: row.try_get("now")?,
            has_changed_settings: row.try_get("has_changed_settings")?,
            row: xid.map(|_| TailRow::from_row(row)).transpose()?,
        })
    }
}

impl Session {
    /// The number of new rows; nothing was done if there is none.
    pub(super) async fn read_quickly(
        &mut self,
        owned: &[Shard],
        reader: &Reader,
    ) -> Result<Option<usize>, ReadError> {
        let since = self.previous.as_ref().map(Snapshot::later).unwrap_or_default();
        if since.is_empty() || since.len() > RANGES_MAX {
            return Ok(None);
        }
        let asked_at = Instant::now();
        let found: Vec<QuickRow> = ranges(include_str!("../sql/quick_read.sql"), &since, &TailKey::before(0))
            .bind_all((owned, ROWS_MAX))
            .fetch_all(&mut self.connection)
            .with_db_timeout()
            .await?;
        let Some(first) = found.first() else {
            return Ok(None);
        };
        let (snapshot, now) = parse_snapshot(&first.snapshot, first.in_recovery, first.now)?;
        let is_whole = !first.has_changed_settings && found.len() < ROWS_MAX as usize;
        let rows: Vec<QueueRow> = found
            .into_iter()
            .filter_map(|found| found.row)
            .map(QueueRow::from)
            .collect();
        if !is_whole || rows.iter().any(|row| !self.known.contains(&row.endpoint)) {
            return Ok(None);
        }
        reader.clock.set(asked_at, now);
        self.previous = Some(snapshot);
        let count = rows.len();
        if count > 0 {
            send(&reader.out, ReaderMessage::Page { rows, cut: None }).await?;
        }
        Ok(Some(count))
    }
}
