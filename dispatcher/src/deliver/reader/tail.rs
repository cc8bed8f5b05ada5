//! The tail itself: pages of queue rows whose transactions became visible.

use sqlx::{
    Postgres,
    postgres::{PgArguments, PgRow},
    query::QueryAs,
};

use super::{wanted::WaitingRow, *};
use crate::bind::BindAll;

impl Session {
    /// Reads the rows of transactions that became visible, page by page.
    pub(super) async fn tail(
        &mut self,
        new: &[Range<u64>],
        owned: &[Shard],
        out: &Output<'_>,
    ) -> Result<usize, ReadError> {
        let mut after = TailKey::before(0);
        let mut total = 0;
        loop {
            let left = &new[new.partition_point(|range| range.end <= after.xid)..];
            if left.is_empty() || owned.is_empty() {
                return Ok(total);
            }
            let page = self.page(left, owned, &after).await?;
            total += page.len();
            let full = page.len() as i64 == PAGE_ROWS;
            let Some(last) = page.last().map(|row| row.key) else {
                return Ok(total);
            };
            let of_last = page
                .iter()
                .rev()
                .take_while(|row| row.key.endpoint == last.endpoint && row.key.xid == last.xid);
            // One transaction may have inserted a million rows for one endpoint: its lane reads them from disk later.
            let cut = full && of_last.count() >= ENDPOINT_ROWS_MAX;
            after = last;
            if cut {
                after.event = EventId(uuid::Uuid::max());
            }
            self.introduce(page.iter().map(|row| row.key.endpoint), out)
                .await?;
            let rows = page.into_iter().map(QueueRow::from).collect();
            let cut = cut.then_some((last.endpoint, last.event));
            send(out, ReaderMessage::Page { rows, cut }).await?;
            if !full {
                return Ok(total);
            }
        }
    }

    async fn page(
        &mut self,
        new: &[Range<u64>],
        owned: &[Shard],
        after: &TailKey,
    ) -> Result<Vec<TailRow>, sqlx::Error> {
        ranges(include_str!("../sql/tail_page.sql"), new, after)
            .bind_all((owned, PAGE_ROWS))
            .fetch_all(&mut self.connection)
            .with_db_timeout()
            .await
    }
}

/// A statement whose first parameters are ranges of transactions, without what was read before.
pub(super) fn ranges<'q, R>(
    statement: &'static str,
    new: &[Range<u64>],
    after: &TailKey,
) -> QueryAs<'q, Postgres, R, PgArguments>
where
    R: for<'r> FromRow<'r, PgRow>,
{
    let starts = new.iter().map(|range| TailKey::before(range.start).max(*after));
    let (mut transactions, mut endpoints, mut events) = (Vec::new(), Vec::new(), Vec::new());
    for start in starts {
        transactions.push(start.xid);
        endpoints.push(start.endpoint);
        events.push(start.event);
    }
    sqlx::query_as(statement).bind_all((
        xids(transactions.into_iter()),
        endpoints,
        events,
        xids(new.iter().map(|range| range.end)),
    ))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TailKey {
    xid: u64,
    endpoint: EndpointId,
    event: EventId,
}

impl TailKey {
    /// Below every row of the transaction.
    pub(super) const fn before(xid: u64) -> Self {
        Self {
            xid,
            endpoint: EndpointId(0),
            event: EventId::LOWEST,
        }
    }
}

pub(super) struct TailRow {
    key: TailKey,
    shard: Shard,
    delivery: QueuedDelivery,
}

impl From<TailRow> for QueueRow {
    fn from(row: TailRow) -> Self {
        Self {
            endpoint: row.key.endpoint,
            shard: row.shard,
            delivery: row.delivery,
        }
    }
}

impl FromRow<'_, PgRow> for TailRow {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let xid: &str = row.try_get("xid")?;
        let waiting = WaitingRow {
            endpoint_id: row.try_get("endpoint_id")?,
            event_id: row.try_get("event_id")?,
            tenant_id: row.try_get("tenant_id")?,
            type_id: row.try_get("type_id")?,
            key_id: row.try_get("key_id")?,
            attempt: row.try_get("attempt")?,
            step: 0,
            replay_id: row.try_get("replay_id")?,
            due_at: None,
        };
        let key = TailKey {
            xid: xid.parse().map_err(|e| sqlx::Error::Decode(Box::new(e)))?,
            endpoint: waiting.endpoint_id,
            event: waiting.event_id,
        };
        Ok(Self {
            key,
            shard: row.try_get("shard")?,
            delivery: waiting.delivery(),
        })
    }
}
