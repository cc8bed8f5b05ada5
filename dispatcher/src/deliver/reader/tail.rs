//! The tail itself: pages of queue rows whose transactions became visible.

use super::{wanted::WaitingRow, *};

impl Session {
    /// Reads the rows of transactions that became visible, page by page.
    pub(super) async fn tail(
        &mut self,
        new: &[Range<u64>],
        owned: &[Shard],
        out: &mpsc::Sender<ReaderMessage>,
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
            let rows = page
                .into_iter()
                .map(|row| QueueRow {
                    endpoint: row.key.endpoint,
                    shard: row.shard,
                    delivery: row.delivery,
                })
                .collect();
            send(
                out,
                ReaderMessage::Page {
                    rows,
                    cut: cut.then_some((last.endpoint, last.event)),
                },
            )
            .await?;
            if !full {
                return Ok(total);
            }
        }
    }

    /// One index scan per range of transactions, in their order. The bounds are plain parameters: with a function of
    /// the snapshot in the query the planner scans the table, and with `= any` it sorts everything. Each range has a
    /// single lower bound, computed here: given two, the index would use the wrong one and scan rows that were read
    /// before.
    async fn page(
        &mut self,
        new: &[Range<u64>],
        owned: &[Shard],
        after: &TailKey,
    ) -> Result<Vec<TailRow>, sqlx::Error> {
        let starts: Vec<TailKey> = new
            .iter()
            .map(|range| TailKey::before(range.start).max(*after))
            .collect();
        sqlx::query_as(
            "select q.* from unnest($1::xid8[], $2::int[], $3::uuid[], $4::xid8[]) as r(xid, endpoint_id, event_id, high)
             cross join lateral (
                 select q.xid::text as xid, endpoint_id, event_id, shard, tenant_id, type_id, key_id, attempt, replay_id
                 from postrider.queue q
                 where (q.xid, endpoint_id, event_id) > (r.xid, r.endpoint_id, r.event_id) and q.xid < r.high
                   and shard = any($5) and shard >= 0
                 order by q.xid, endpoint_id, event_id limit $6
             ) q
             limit $6",
        )
        .bind(xids(starts.iter().map(|start| start.xid)))
        .bind(starts.iter().map(|start| start.endpoint).collect::<Vec<_>>())
        .bind(starts.iter().map(|start| start.event).collect::<Vec<_>>())
        .bind(xids(new.iter().map(|range| range.end)))
        .bind(owned)
        .bind(PAGE_ROWS)
        .fetch_all(&mut self.connection)
        .with_db_timeout()
        .await
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct TailKey {
    xid: u64,
    endpoint: EndpointId,
    event: EventId,
}

impl TailKey {
    /// Below every row of the transaction.
    const fn before(xid: u64) -> Self {
        Self {
            xid,
            endpoint: EndpointId(0),
            event: EventId::LOWEST,
        }
    }
}

struct TailRow {
    key: TailKey,
    shard: Shard,
    delivery: QueuedDelivery,
}

impl FromRow<'_, sqlx::postgres::PgRow> for TailRow {
    fn from_row(row: &sqlx::postgres::PgRow) -> Result<Self, sqlx::Error> {
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
