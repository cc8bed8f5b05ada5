//! What the lanes request besides the tail: settings, rows left on disk, due retries, the first delivery of a key.

use super::*;

impl Session {
    /// Reads settings of endpoints without a lane, or not yet known on a new connection.
    pub(super) async fn load(&mut self, ids: &[EndpointId], out: &Output<'_>) -> Result<(), ReadError> {
        if ids.is_empty() {
            return Ok(());
        }
        self.known.introduce(ids.iter().copied());
        for ids in ids.chunks(LOAD_MAX) {
            let rows = endpoint::load(&mut self.connection, ids)
                .with_db_timeout()
                .await?;
            send(out, ReaderMessage::Endpoints(rows)).await?;
        }
        Ok(())
    }

    pub(super) async fn refill(
        &mut self,
        refills: &[(EndpointId, Refill)],
        out: &Output<'_>,
    ) -> Result<(), ReadError> {
        let endpoints: Vec<EndpointId> = refills.iter().map(|(id, _)| *id).collect();
        let floors: Vec<EventId> = refills.iter().map(|(_, refill)| refill.floor).collect();
        let limits: Vec<i32> = refills.iter().map(|(_, refill)| refill.limit as i32).collect();
        let rows: Vec<WaitingRow> = sqlx::query_as(
            "select q.endpoint_id, q.event_id, q.tenant_id, q.type_id, q.key_id, q.attempt, 0::smallint as step, q.replay_id,
                    null::timestamptz as due_at
             from unnest($1::int[], $2::uuid[], $3::int[]) as r(endpoint_id, floor, n)
             cross join lateral (
                 select * from postrider.queue q
                 where q.endpoint_id = r.endpoint_id and q.event_id > r.floor
                 order by q.event_id limit r.n
             ) q",
        )
        .bind(&endpoints)
        .bind(&floors)
        .bind(&limits)
        .fetch_all(&mut self.connection)
        .with_db_timeout()
        .await?;
        let mut rows = rows.into_iter().peekable();
        // The lateral join keeps the order of the list, so that each endpoint's rows are adjacent.
        for (endpoint, asked) in refills {
            let mut deliveries = Vec::new();
            while let Some(row) = rows.next_if(|row| row.endpoint_id == *endpoint) {
                deliveries.push(row.delivery());
            }
            send(
                out,
                ReaderMessage::Refilled {
                    endpoint: *endpoint,
                    asked: *asked,
                    rows: deliveries,
                },
            )
            .await?;
        }
        Ok(())
    }

    pub(super) async fn read_due(
        &mut self,
        due: &[(EndpointId, DueRead)],
        now: DateTime<Utc>,
        out: &Output<'_>,
    ) -> Result<(), ReadError> {
        if due.is_empty() {
            return Ok(());
        }
        let endpoints: Vec<EndpointId> = due.iter().map(|(id, _)| *id).collect();
        let limits: Vec<i32> = due.iter().map(|(_, asked)| asked.limit as i32).collect();
        let rows: Vec<WaitingRow> = sqlx::query_as(
            "select q.endpoint_id, q.event_id, q.tenant_id, q.type_id, q.key_id, q.attempt, q.step, q.replay_id, q.due_at
             from unnest($1::int[], $2::int[], $3::timestamptz[]) as r(endpoint_id, n, from_at)
             cross join lateral (
                 select * from postrider.retries q
                 where q.endpoint_id = r.endpoint_id and q.attempt >= 0 and q.due_at >= r.from_at
                 order by q.due_at limit r.n
             ) q",
        )
        .bind(&endpoints)
        .bind(&limits)
        .bind(due.iter().map(|(_, asked)| asked.from).collect::<Vec<_>>())
        .fetch_all(&mut self.connection)
        .with_db_timeout()
        .await?;
        let mut rows = rows.into_iter().peekable();
        for (endpoint, asked) in due {
            let (mut due, mut read) = (DueRows::default(), 0);
            while let Some(row) = rows.next_if(|row| row.endpoint_id == *endpoint) {
                read += 1;
                due.first = due.first.or(row.due_at);
                match row.due_at {
                    Some(at) if at > now && !asked.even_later => due.later = due.later.or(Some(at)),
                    _ => due.rows.push(row.delivery()),
                }
            }
            // The limit was reached and all rows are due: there may be more.
            if read == asked.limit && due.later.is_none() {
                due.later = Some(now);
            }
            send(
                out,
                ReaderMessage::Due {
                    endpoint: *endpoint,
                    due,
                },
            )
            .await?;
        }
        Ok(())
    }

    /// Reads the first delivery of each key, where it is a fresh one.
    pub(super) async fn read_keys(
        &mut self,
        wanted: &[(EndpointId, Vec<i64>)],
        out: &Output<'_>,
    ) -> Result<(), ReadError> {
        for (endpoint, keys) in wanted {
            let rows: Vec<WaitingRow> = sqlx::query_as(
                "select q.endpoint_id, q.event_id, q.tenant_id, q.type_id, q.key_id, q.attempt, 0::smallint as step,
                        q.replay_id, null::timestamptz as due_at
                 from unnest($2::bigint[]) as k(key_id)
                 cross join lateral (
                     select * from postrider.queue q
                     where q.endpoint_id = $1 and q.key_id = k.key_id order by q.sequence limit 1
                 ) q
                 where not exists (select from postrider.retries r
                                   where r.endpoint_id = $1 and r.key_id = k.key_id and r.sequence < q.sequence)",
            )
            .bind(endpoint)
            .bind(keys)
            .fetch_all(&mut self.connection)
            .with_db_timeout()
            .await?;
            let heads = rows.into_iter().map(WaitingRow::delivery).collect();
            send(
                out,
                ReaderMessage::Keys {
                    endpoint: *endpoint,
                    heads,
                },
            )
            .await?;
        }
        Ok(())
    }
}

#[derive(FromRow)]
pub(super) struct WaitingRow {
    pub(super) endpoint_id: EndpointId,
    pub(super) event_id: EventId,
    pub(super) tenant_id: TenantId,
    pub(super) type_id: TypeId,
    pub(super) key_id: Option<i64>,
    pub(super) attempt: i16,
    pub(super) step: i16,
    pub(super) replay_id: Option<String>,
    pub(super) due_at: Option<DateTime<Utc>>,
}

impl WaitingRow {
    pub(super) fn delivery(self) -> QueuedDelivery {
        QueuedDelivery {
            event: self.event_id,
            tenant: self.tenant_id,
            type_id: self.type_id,
            attempt: u16::try_from(self.attempt).unwrap_or(0),
            step: u16::try_from(self.step).unwrap_or(0),
            key: self.key_id,
            replay: self.replay_id.map(String::into_boxed_str),
        }
    }
}
