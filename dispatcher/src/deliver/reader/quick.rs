//! A cycle in one statement, for times when little happens: nothing is requested, no settings have changed, and the few
//! new rows belong to known endpoints. Everything else is left to a whole cycle. The bodies of recent events come along:
//! their attempts usually start at once.

use chrono::TimeDelta;
use sqlx::postgres::PgRow;

use super::{
    tail::{TailKey, TailRow, ranges},
    *,
};
use crate::{
    bind::BindAll,
    deliver::bodies::{Content, SMALL_BYTES_MAX},
};

/// Rows that one statement reads.
const ROWS_MAX: i64 = 32;
/// With more ranges of transactions than this, the system is not quiet.
const RANGES_MAX: usize = 16;

/// Events emitted this long ago, or later, are recent. Clocks may differ by a little.
const RECENT: TimeDelta = TimeDelta::minutes(10);
const AHEAD_MAX: TimeDelta = TimeDelta::minutes(1);

struct QuickRow {
    snapshot: String,
    in_recovery: bool,
    backend: i32,
    now: DateTime<Utc>,
    has_changed_settings: bool,
    row: Option<TailRow>,
    content: Option<(EventId, Content)>,
}

impl FromRow<'_, PgRow> for QuickRow {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let xid: Option<&str> = row.try_get("xid")?;
        Ok(Self {
            snapshot: row.try_get("snapshot")?,
            in_recovery: row.try_get("in_recovery")?,
            backend: row.try_get("backend")?,
            now: row.try_get("now")?,
            has_changed_settings: row.try_get("has_changed_settings")?,
            row: xid.map(|_| TailRow::from_row(row)).transpose()?,
            content: content(row)?,
        })
    }
}

fn content(row: &PgRow) -> Result<Option<(EventId, Content)>, sqlx::Error> {
    let Some(body) = row.try_get::<Option<Vec<u8>>, _>("body")? else {
        return Ok(None);
    };
    let event = row.try_get("event_id")?;
    let content = Content::new(event, row.try_get("chosen_id")?, body, row.try_get("full_data")?);
    Ok(Some((event, content)))
}

impl Session {
    /// The number of new rows; nothing was done if there is none.
    pub(super) async fn read_quickly(
        &mut self,
        owned: &[Shard],
        out: &Output<'_>,
    ) -> Result<Option<usize>, ReadError> {
        let reader = out.reader;
        let since = self.previous.as_ref().map(Snapshot::later).unwrap_or_default();
        if since.is_empty() || since.len() > RANGES_MAX {
            return Ok(None);
        }
        let asked_at = Instant::now();
        let now = reader.clock.now();
        let first = EventId::first_of((now - RECENT).timestamp_millis());
        let last = EventId::first_of((now + AHEAD_MAX).timestamp_millis());
        let bytes_max = match reader.with_traces {
            true => -1, // Their trace context has to be read too.
            false => SMALL_BYTES_MAX as i32,
        };
        let mut found: Vec<QuickRow> =
            ranges(include_str!("../sql/quick_read.sql"), &since, &TailKey::before(0))
                .bind_all((owned, ROWS_MAX, first, last, bytes_max))
                .fetch_all(&mut self.connection)
                .with_db_timeout()
                .await?;
        let Some(first) = found.first() else {
            return Ok(None);
        };
        let (snapshot, now) = parse_snapshot(&first.snapshot, first.in_recovery, first.now)?;
        self.recognise(first.backend)?;
        let is_whole = !first.has_changed_settings && found.len() < ROWS_MAX as usize;
        let contents = found.iter_mut().filter_map(|found| found.content.take());
        let contents: HashMap<_, _> = contents.collect();
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
            reader.prefetched.replace(contents);
            send(out, ReaderMessage::Page { rows, cut: None }).await?;
        }
        Ok(Some(count))
    }
}
