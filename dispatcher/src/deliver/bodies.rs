//! Event bodies being sent, and the memory they may use.
//!
//! Small bodies are read in batches without a permit; the number of attempts bounds them. A large body is read alone,
//! by the attempt that sends it, after that attempt has acquired its share of memory. The share is released as soon
//! as the bytes are written to the socket, so no attempt waits for memory while holding some, and a receiver that
//! accepts the body and then hangs holds none.
//!
//! Invariant: memory is divided by dynamic thresholds (`division.rs`), like in-flight capacity: bodies stuck on slow
//! endpoints never starve other endpoints.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, Weak},
};

use bytes::Bytes;
use postrider_proto::{
    EventId, TenantId,
    trace::{TraceContext, TraceState},
};
use sqlx::PgConnection;
use tokio::sync::OnceCell;

use crate::{
    bind::BindAll,
    connector::Connector,
    db_timeout::WithDbTimeout,
    dedicated_connection::DedicatedConnection,
    deliver::{
        division::Holder,
        fair_queue::{Fair, FairShare},
    },
    lock::lock,
};

/// Bodies up to this size are read in batches. In flight they use at most this times `max_in_flight`.
pub(crate) const SMALL_BYTES_MAX: usize = 16 * 1024;
/// Memory for large bodies.
const LARGE_BYTES_MAX: usize = 128 * 1024 * 1024;
/// Connections that large bodies are read on.
const READERS: usize = 4;
/// Entries of `being_read` before finished ones are purged.
const BEING_READ_MAX: usize = 4096;

/// An event as it is sent. One read serves all its endpoints.
pub(crate) struct Content {
    pub(crate) public_id: Arc<str>,
    pub(crate) body: Bytes,
    /// Full data of a thin event.
    pub(crate) full_data: Option<String>,
    /// The producer's trace context; always `None` when tracing is off.
    pub(crate) trace: Option<(TraceContext, Option<TraceState>)>,
    /// The event has outlived its partition.
    pub(crate) archived: bool,
}

impl Content {
    /// Of an event without a trace context that is still in its partition.
    pub(crate) fn new(
        id: EventId,
        chosen_id: Option<String>,
        body: Vec<u8>,
        full_data: Option<Vec<u8>>,
    ) -> Self {
        Self {
            public_id: chosen_id.unwrap_or_else(|| id.generated()).into(),
            body: body.into(),
            full_data: full_data.and_then(|data| String::from_utf8(data).ok()),
            trace: None,
            archived: false,
        }
    }
}

/// Bodies that came with the rows of the latest quick read, for attempts that start right after it.
#[derive(Clone, Default)]
pub(crate) struct Prefetched(Arc<Mutex<HashMap<EventId, Arc<Content>>>>);

impl Prefetched {
    pub(crate) fn replace(&self, contents: HashMap<EventId, Content>) {
        let contents = contents.into_iter().map(|(id, content)| (id, Arc::new(content)));
        *lock(&self.0) = contents.collect();
    }

    pub(crate) fn clear(&self) {
        lock(&self.0).clear();
    }

    /// Takes those that are here out of the list. Each may be needed for further endpoints.
    pub(crate) fn find(&self, events: &mut Vec<(EventId, TenantId)>) -> HashMap<EventId, Stored> {
        let contents = lock(&self.0);
        let mut found = HashMap::new();
        if !contents.is_empty() {
            events.retain(|(event, _)| match contents.get(event) {
                None => true,
                Some(content) => {
                    found.insert(*event, Stored::Small(content.clone()));
                    false
                }
            });
        }
        found
    }
}

/// One event of a batch read.
#[derive(Clone)]
pub(crate) enum Stored {
    Small(Arc<Content>),
    /// Size of body and data in bytes. Read once memory is available.
    Large(usize),
}

/// Id, the producer's own id, body, full data, trace, and the size of body and data. Body and data are null above the
/// size limit.
type StoredRow = (
    EventId,
    Option<String>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    i32,
);

const STORED: &str = include_str!("sql/events.sql");
const STORED_WITH_TRACE: &str = include_str!("sql/events_with_trace.sql");
const ARCHIVED: &str = include_str!("sql/archived_events.sql");

/// Reads events, which must be sorted and unique. Those larger than `most` are returned as their size only.
pub(crate) async fn read(
    connection: &mut PgConnection,
    events: &[(EventId, TenantId)],
    most: usize,
    with_traces: bool,
) -> Result<HashMap<EventId, Stored>, sqlx::Error> {
    let (ids, tenants): (Vec<EventId>, Vec<TenantId>) = events.iter().copied().unzip();
    let (Some(first), Some(last)) = (ids.first(), ids.last()) else {
        return Ok(HashMap::new());
    };
    let most = i32::try_from(most).unwrap_or(i32::MAX);
    let statement = if with_traces { STORED_WITH_TRACE } else { STORED };
    let rows: Vec<StoredRow> = sqlx::query_as(statement)
        .bind_all((&ids, first, last, most, tenants))
        .fetch_all(&mut *connection)
        .with_db_timeout()
        .await?;
    // Events whose partition was dropped while deliveries were pending.
    let archived = if rows.len() < ids.len() {
        archived(connection, &ids, &rows, most, with_traces).await?
    } else {
        Vec::new()
    };
    let found = rows.len();
    let all = rows.into_iter().chain(archived).enumerate();
    Ok(all
        .map(|(index, row)| (row.0, stored(row, index >= found)))
        .collect())
}

async fn archived(
    connection: &mut PgConnection,
    ids: &[EventId],
    found: &[StoredRow],
    most: i32,
    with_traces: bool,
) -> Result<Vec<StoredRow>, sqlx::Error> {
    let found: HashSet<EventId> = found.iter().map(|row| row.0).collect();
    let missing: Vec<EventId> = ids.iter().copied().filter(|id| !found.contains(id)).collect();
    sqlx::query_as(ARCHIVED)
        .bind_all((missing, with_traces, most))
        .fetch_all(connection)
        .with_db_timeout()
        .await
}

fn stored((id, chosen_id, body, full_data, trace, size): StoredRow, archived: bool) -> Stored {
    let Some(body) = body else {
        return Stored::Large(usize::try_from(size).unwrap_or(0));
    };
    Stored::Small(Arc::new(Content {
        trace: trace.and_then(|bytes| TraceContext::from_bytes(&bytes)),
        archived,
        ..Content::new(id, chosen_id, body, full_data)
    }))
}

/// Filled by the first reader.
type Slot = OnceCell<Option<Arc<Content>>>;

/// Large bodies: admission to memory, and the connections they are read on.
pub(crate) struct LargeBodies {
    memory: Fair,
    readers: Fair,
    /// Connections that large bodies are read on. `readers` bounds how many are in use.
    idle: Mutex<Vec<DedicatedConnection>>,
    connector: Connector,
    /// Reads in progress, shared by other deliveries of the same event.
    being_read: Mutex<HashMap<EventId, Weak<Slot>>>,
    with_traces: bool,
}

impl LargeBodies {
    pub(crate) fn new(connector: &Connector, with_traces: bool) -> Self {
        Self {
            memory: Fair::new(LARGE_BYTES_MAX),
            readers: Fair::new(READERS),
            idle: Mutex::default(),
            connector: connector.clone(),
            being_read: Mutex::default(),
            with_traces,
        }
    }

    /// Waits until the endpoint may hold this much memory.
    pub(crate) async fn share(&self, holder: Holder, bytes: usize) -> FairShare {
        self.memory.acquire(holder, bytes).await
    }

    /// The event, or `None` when it no longer exists. Concurrent readers of the same event share one read.
    pub(crate) async fn read(
        &self,
        holder: Holder,
        event: EventId,
    ) -> Result<Option<Arc<Content>>, sqlx::Error> {
        let slot = self.slot(event);
        slot.get_or_try_init(|| self.fetch(holder, event)).await.cloned()
    }

    fn slot(&self, event: EventId) -> Arc<Slot> {
        let mut being_read = lock(&self.being_read);
        if let Some(slot) = being_read.get(&event).and_then(Weak::upgrade) {
            return slot;
        }
        if being_read.len() >= BEING_READ_MAX {
            being_read.retain(|_, slot| slot.strong_count() > 0);
        }
        let slot = Arc::new(Slot::new());
        being_read.insert(event, Arc::downgrade(&slot));
        slot
    }

    async fn fetch(&self, holder: Holder, event: EventId) -> Result<Option<Arc<Content>>, sqlx::Error> {
        let _turn = self.readers.acquire(holder, 1).await;
        let idle = lock(&self.idle).pop();
        let mut connection = idle.unwrap_or_else(|| DedicatedConnection::new(self.connector.clone()));
        let opened = connection.open().await?;
        let events = [(event, holder.tenant)];
        let mut found = read(opened, &events, usize::MAX, self.with_traces).await?;
        // After an error, or when the attempt is abandoned in the middle, it is closed instead.
        lock(&self.idle).push(connection);
        Ok(found.remove(&event).and_then(|stored| match stored {
            Stored::Small(content) => Some(content),
            Stored::Large(_) => None,
        }))
    }
}

/// The bytes of a body with its share of memory, released when the last byte is written.
pub(crate) fn with_share(content: Arc<Content>, share: Option<FairShare>) -> Bytes {
    struct SharedBody {
        content: Arc<Content>,
        _share: FairShare,
    }
    impl AsRef<[u8]> for SharedBody {
        fn as_ref(&self) -> &[u8] {
            &self.content.body
        }
    }
    match share {
        None => content.body.clone(),
        Some(share) => Bytes::from_owner(SharedBody {
            content,
            _share: share,
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use postrider_proto::EndpointId;
    use tokio::{net::TcpListener, time::timeout};

    use super::*;

    #[tokio::test]
    async fn attempts_that_are_abandoned_while_they_read_cost_no_reader() {
        // Accepts connections and never says a word: every read is abandoned in the middle.
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = silent.local_addr().expect("bound").port();
        let options = sqlx::postgres::PgConnectOptions::new()
            .host("127.0.0.1")
            .port(port);
        let bodies = LargeBodies::new(&options.into(), false);
        let holder = Holder {
            endpoint: EndpointId(1),
            tenant: TenantId(1),
        };
        for _ in 0..3 * READERS {
            let read = bodies.read(holder, EventId::LOWEST);
            let abandoned = timeout(Duration::from_millis(5), read).await;
            assert!(abandoned.is_err(), "it still has a connection to wait on");
        }
    }
}
