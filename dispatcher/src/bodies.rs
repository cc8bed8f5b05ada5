//! Event bodies on their way out, and the memory they may take.
//!
//! Small bodies are read in batches and need no permission: the number of attempts bounds them. A large one is read alone, by
//! the attempt that sends it, once that attempt has its share of the memory; it gives the share back as soon as the bytes are
//! written to the socket. So nobody waits for memory while holding some, and a receiver that takes its body and then hangs
//! holds none.
//!
//! Invariant: the memory is divided by dynamic thresholds (`division.rs`), as places on the wire are: bodies that are not taken keep
//! no other endpoint from its own.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use bytes::Bytes;
use postrider_proto::{
    EndpointId, EventId,
    trace::{TraceContext, TraceState},
};
use sqlx::{PgConnection, postgres::PgConnectOptions};
use tokio::sync::{Semaphore, oneshot};

use crate::{
    answer::Answered,
    division::{Division, Holder},
    line::Line,
};

/// A body up to this size is read with the others. All of them in flight take at most this times `max_in_flight`.
pub(crate) const SMALL_BYTES_MAX: usize = 16 * 1024;
/// Memory for large bodies.
const LARGE_BYTES_MAX: usize = 128 * 1024 * 1024;
/// Connections that large bodies are read on.
const READERS: usize = 4;
/// Bodies that may be shared by the deliveries of one event.
const SHARED_MAX: usize = 4096;

/// An event as it is sent. One read serves all its endpoints.
pub(crate) struct Content {
    pub(crate) public_id: Arc<str>,
    pub(crate) body: Bytes,
    /// The data as it was given, of a thin event.
    pub(crate) full_data: Option<String>,
    /// Where it belongs in its producer's trace; never when traces are off.
    pub(crate) trace: Option<(TraceContext, Option<TraceState>)>,
    /// It has outlived its partition.
    pub(crate) held: bool,
}

/// What a batch says of one event.
pub(crate) enum Stored {
    Small(Arc<Content>),
    /// Bytes of its body and data. It is read when there is memory for it.
    Large(usize),
}

/// Id, the producer's own id, body, full data, trace, and how large body and data are. Body and data are null when that is
/// more than was asked for.
type StoredRow = (
    EventId,
    Option<String>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    i32,
);

// A walk for each id, not `= any`: under a generic plan that would scan every partition. The bounds leave out those of other
// days before the first is opened. The size of a value that is stored apart is known without fetching it.
const STORED: &str = "select e.id, e.chosen_id, case when e.size <= $4 then e.body end,
            case when e.size <= $4 then e.full_data end, null::bytea, e.size
     from unnest($1::uuid[]) u(id)
     cross join lateral (
         select e.id, e.chosen_id, e.body, e.full_data,
                octet_length(e.body) + coalesce(octet_length(e.full_data), 0) as size
         from postrider.events e
         where e.id = u.id and e.id >= $2 and e.id <= $3 limit 1
     ) e";
const STORED_WITH_TRACE: &str = "select e.id, e.chosen_id, case when e.size <= $4 then e.body end,
            case when e.size <= $4 then e.full_data end, t.context, e.size
     from unnest($1::uuid[]) u(id)
     cross join lateral (
         select e.id, e.chosen_id, e.body, e.full_data,
                octet_length(e.body) + coalesce(octet_length(e.full_data), 0) as size
         from postrider.events e
         where e.id = u.id and e.id >= $2 and e.id <= $3 limit 1
     ) e
     left join postrider.traces t on t.event_id = u.id";
const HELD: &str = "select e.id, e.chosen_id, case when e.size <= $3 then e.body end,
            case when e.size <= $3 then e.full_data end,
            case when $2 then (select t.context from postrider.traces t where t.event_id = e.id) end, e.size
     from unnest($1::uuid[]) u(id)
     cross join lateral (
         select e.id, e.chosen_id, e.body, e.full_data,
                octet_length(e.body) + coalesce(octet_length(e.full_data), 0) as size
         from postrider.events_held e where e.id = u.id limit 1
     ) e";

/// These events, ids ascending and each once. Of those larger than `most` only the size.
pub(crate) async fn read(
    connection: &mut PgConnection,
    ids: &[EventId],
    most: usize,
    with_traces: bool,
) -> Result<HashMap<EventId, Stored>, sqlx::Error> {
    let (Some(first), Some(last)) = (ids.first(), ids.last()) else {
        return Ok(HashMap::new());
    };
    let most = i32::try_from(most).unwrap_or(i32::MAX);
    let statement = match with_traces {
        true => STORED_WITH_TRACE,
        false => STORED,
    };
    let rows: Vec<StoredRow> = sqlx::query_as(statement)
        .bind(ids)
        .bind(first)
        .bind(last)
        .bind(most)
        .fetch_all(&mut *connection)
        .answered()
        .await?;
    // Events whose partition is gone while deliveries of them wait.
    let held = match rows.len() < ids.len() {
        true => held(connection, ids, &rows, most, with_traces).await?,
        false => Vec::new(),
    };
    let found = rows.len();
    let all = rows.into_iter().chain(held).enumerate();
    Ok(all
        .map(|(index, row)| (row.0, stored(row, index >= found)))
        .collect())
}

async fn held(
    connection: &mut PgConnection,
    ids: &[EventId],
    found: &[StoredRow],
    most: i32,
    with_traces: bool,
) -> Result<Vec<StoredRow>, sqlx::Error> {
    let found: HashSet<EventId> = found.iter().map(|row| row.0).collect();
    let missing: Vec<EventId> = ids.iter().copied().filter(|id| !found.contains(id)).collect();
    sqlx::query_as(HELD)
        .bind(missing)
        .bind(with_traces)
        .bind(most)
        .fetch_all(connection)
        .answered()
        .await
}

fn stored((id, chosen_id, body, full_data, trace, size): StoredRow, held: bool) -> Stored {
    let Some(body) = body else {
        return Stored::Large(usize::try_from(size).unwrap_or(0));
    };
    Stored::Small(Arc::new(Content {
        public_id: chosen_id.unwrap_or_else(|| id.generated()).into(),
        body: body.into(),
        full_data: full_data.and_then(|data| String::from_utf8(data).ok()),
        trace: trace.and_then(|bytes| TraceContext::from_bytes(&bytes)),
        held,
    }))
}

/// Large bodies: who may have one in memory, and the connections they are read on.
pub(crate) struct LargeBodies {
    memory: Memory,
    readers: Semaphore,
    lines: Mutex<Vec<Line>>,
    /// Those in memory now, for the other deliveries of the same event.
    shared: Mutex<HashMap<EventId, Weak<Content>>>,
    with_traces: bool,
}

impl LargeBodies {
    pub(crate) fn new(options: &PgConnectOptions, with_traces: bool) -> Self {
        Self {
            memory: Memory::new(LARGE_BYTES_MAX),
            readers: Semaphore::new(READERS),
            lines: Mutex::new((0..READERS).map(|_| Line::new(options.clone())).collect()),
            shared: Mutex::default(),
            with_traces,
        }
    }

    /// Waits until the endpoint may have this much in memory.
    pub(crate) async fn share(&self, holder: Holder, bytes: usize) -> MemoryShare {
        self.memory.acquire(holder, bytes).await
    }

    /// The event, or nothing when it is gone.
    pub(crate) async fn read(&self, event: EventId) -> Result<Option<Arc<Content>>, sqlx::Error> {
        if let Some(content) = lock(&self.shared).get(&event).and_then(Weak::upgrade) {
            return Ok(Some(content));
        }
        let content = self.fetch(event).await?;
        if let Some(content) = &content {
            let mut shared = lock(&self.shared);
            if shared.len() >= SHARED_MAX {
                shared.retain(|_, content| content.strong_count() > 0);
            }
            shared.insert(event, Arc::downgrade(content));
        }
        Ok(content)
    }

    async fn fetch(&self, event: EventId) -> Result<Option<Arc<Content>>, sqlx::Error> {
        let _turn = self.readers.acquire().await;
        let Some(mut line) = lock(&self.lines).pop() else {
            return Err(sqlx::Error::PoolClosed);
        };
        let found = async { read(line.open().await?, &[event], usize::MAX, self.with_traces).await }.await;
        if found.is_err() {
            line.close();
        }
        lock(&self.lines).push(line);
        Ok(found?.remove(&event).and_then(|stored| match stored {
            Stored::Small(content) => Some(content),
            Stored::Large(_) => None,
        }))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number of bytes, divided between endpoints.
#[derive(Clone)]
pub(crate) struct Memory(Arc<Mutex<Queue>>);

struct Queue {
    held: Division,
    /// Endpoints with attempts that wait, in turn.
    turns: VecDeque<Holder>,
    waiting: HashMap<EndpointId, VecDeque<(usize, oneshot::Sender<MemoryShare>)>>,
}

/// Bytes of an endpoint. Given back when it is dropped.
pub(crate) struct MemoryShare {
    memory: Memory,
    holder: Holder,
    bytes: usize,
}

impl Memory {
    pub(crate) fn new(size: usize) -> Self {
        Self(Arc::new(Mutex::new(Queue {
            held: Division::new(size),
            turns: VecDeque::new(),
            waiting: HashMap::new(),
        })))
    }

    pub(crate) async fn acquire(&self, holder: Holder, bytes: usize) -> MemoryShare {
        let granted = {
            let mut queue = lock(&self.0);
            if !queue.waiting.contains_key(&holder.endpoint) && queue.admits(holder, bytes) {
                return self.grant(&mut queue, holder, bytes);
            }
            queue.wait(holder, bytes)
        };
        match granted.await {
            Ok(share) => share,
            // The sender goes only with the memory itself, which we hold.
            Err(_) => self.grant(&mut lock(&self.0), holder, bytes),
        }
    }

    fn grant(&self, queue: &mut Queue, holder: Holder, bytes: usize) -> MemoryShare {
        queue.held.take(holder, bytes);
        MemoryShare {
            memory: self.clone(),
            holder,
            bytes,
        }
    }

    fn give_back(&self, holder: Holder, bytes: usize) {
        let mut abandoned = Vec::new();
        {
            let mut queue = lock(&self.0);
            queue.held.give_back(holder, bytes);
            // One each in turn, until a whole round brought nothing.
            let mut refused = 0;
            while refused < queue.turns.len() {
                let Some(holder) = queue.turns.pop_front() else {
                    break;
                };
                let next = queue.next_of(holder);
                if queue.waiting.contains_key(&holder.endpoint) {
                    queue.turns.push_back(holder);
                    refused += 1;
                }
                if let Some((bytes, waiter)) = next {
                    refused = 0;
                    let share = self.grant(&mut queue, holder, bytes);
                    // Dropped outside of the lock, which dropping takes.
                    abandoned.extend(waiter.send(share).err());
                }
            }
        }
        drop(abandoned);
    }
}

impl Queue {
    /// More than the whole memory at once is let through alone: it could never go otherwise.
    fn admits(&self, holder: Holder, bytes: usize) -> bool {
        self.held.taken() == 0 || self.held.admits(holder, bytes)
    }

    fn wait(&mut self, holder: Holder, bytes: usize) -> oneshot::Receiver<MemoryShare> {
        let (granted, share) = oneshot::channel();
        let waiting = self.waiting.entry(holder.endpoint).or_default();
        if waiting.is_empty() {
            self.turns.push_back(holder);
        }
        waiting.push_back((bytes, granted));
        share
    }

    /// The first that waits of an endpoint, if it may go now. Those who went away are passed over.
    fn next_of(&mut self, holder: Holder) -> Option<(usize, oneshot::Sender<MemoryShare>)> {
        let waiting = self.waiting.get_mut(&holder.endpoint)?;
        waiting.retain(|(_, waiter)| !waiter.is_closed());
        let first = waiting.front().map(|(bytes, _)| *bytes);
        let next = match first {
            Some(bytes) if self.admits(holder, bytes) => self.waiting.get_mut(&holder.endpoint)?.pop_front(),
            _ => None,
        };
        if self.waiting.get(&holder.endpoint).is_some_and(VecDeque::is_empty) {
            self.waiting.remove(&holder.endpoint);
        }
        next
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.memory.give_back(self.holder, self.bytes);
    }
}

/// The bytes of a body with the share they are held under: gone when the last of them is written.
pub(crate) fn lent(content: Arc<Content>, share: Option<MemoryShare>) -> Bytes {
    struct Lent {
        content: Arc<Content>,
        _share: MemoryShare,
    }
    impl AsRef<[u8]> for Lent {
        fn as_ref(&self) -> &[u8] {
            &self.content.body
        }
    }
    match share {
        None => content.body.clone(),
        Some(share) => Bytes::from_owner(Lent {
            content,
            _share: share,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::division::holder;
    use std::time::Duration;

    const BODY: usize = 250 * 1024;

    async fn now<T>(work: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(Duration::from_millis(20), work).await.ok()
    }

    /// As many as an endpoint gets when it lets go of none.
    async fn fill(memory: &Memory, holder: Holder) -> Vec<MemoryShare> {
        let mut shares = Vec::new();
        while let Some(share) = now(memory.acquire(holder, BODY)).await {
            shares.push(share);
        }
        shares
    }

    #[tokio::test]
    async fn no_number_of_bodies_that_stay_keeps_another_endpoint_from_its_own() {
        let memory = Memory::new(LARGE_BYTES_MAX);
        let mut held = Vec::new();
        for lane in 0..60 {
            held.push(fill(&memory, holder(lane, lane / 2)).await);
            let other = now(memory.acquire(holder(-1, -1), BODY)).await;
            assert!(other.is_some(), "beside {lane} that hold all they get");
            if lane < 5 {
                let neighbour = now(memory.acquire(holder(-2, 0), BODY)).await;
                assert!(neighbour.is_some(), "of the tenant of the first two");
            }
        }
    }

    #[tokio::test]
    async fn all_that_wait_go_in_turn_as_memory_is_given_back_and_none_is_lost() {
        let memory = Memory::new(4 * BODY);
        let mut held = fill(&memory, holder(1, 1)).await;
        let waiting: Vec<_> = (0..50)
            .map(|number| {
                let memory = memory.clone();
                tokio::spawn(async move {
                    drop(memory.acquire(holder(1 + number % 5, 1 + number % 2), BODY).await)
                })
            })
            .collect();
        tokio::task::yield_now().await;
        let given_up = tokio::spawn({
            let memory = memory.clone();
            async move { drop(memory.acquire(holder(1, 1), BODY).await) }
        });
        tokio::task::yield_now().await;
        given_up.abort();
        held.clear();
        for one in waiting {
            now(one).await.expect("in turn").expect("no panic");
        }
        assert!(lock(&memory.0).held.is_empty());
        assert!(lock(&memory.0).waiting.is_empty() && lock(&memory.0).turns.is_empty());
    }

    #[tokio::test]
    async fn what_is_larger_than_the_whole_memory_goes_alone() {
        let memory = Memory::new(BODY / 2);
        let share = now(memory.acquire(holder(1, 1), BODY)).await;
        assert!(share.is_some());
        assert!(now(memory.acquire(holder(2, 2), BODY)).await.is_none());
    }
}
