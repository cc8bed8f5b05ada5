//! Single emits that arrive together share a transaction: one commit serves all of them.
//! Invariant: what one request does wrong changes nothing for the others. A refusal is a value; when the database
//! refuses the whole group, which then has left nothing behind, each of its members runs alone.

use std::{
    io::ErrorKind,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use postrider_dispatcher::Wake;
use postrider_sender::{EmitError, Emitted, NewEvent, Patience, Sender};
use tokio::{
    sync::{Mutex as AsyncMutex, mpsc, oneshot},
    time::timeout,
};

use crate::{Pool, meters::METERS, tables, traced::Carried};

/// Events in one transaction. More would make the first wait for the last.
const GROUP_MAX: usize = 64;
/// Groups at work: while one waits for the disk, the next one is written.
const GROUPS_AT_ONCE: usize = 2;
/// Long enough for a busy database; what takes longer may have been committed or not.
const GROUP_TIME_MAX: Duration = Duration::from_secs(10);
const WAITING_MAX: usize = 4_096;

/// An event of a request, which outlives the request: one that is given up on may still be emitted.
#[derive(Debug, Clone)]
pub(crate) struct OwnedEvent {
    pub(crate) tenant: String,
    pub(crate) type_name: String,
    pub(crate) data: String,
    pub(crate) id: Option<String>,
    pub(crate) version: Option<String>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) trace: Option<Carried>,
}

impl OwnedEvent {
    pub(crate) fn borrow(&self) -> NewEvent<'_> {
        NewEvent::new(&self.tenant, &self.type_name, &self.data)
            .id(self.id.as_deref())
            .version(self.version.as_deref())
            .ordering_key(self.ordering_key.as_deref())
            .trace(self.trace.as_ref().map(|trace| trace.context))
            .trace_state(self.trace.as_ref().and_then(|trace| trace.state.as_ref()))
    }
}

struct Waiting {
    event: OwnedEvent,
    answer: oneshot::Sender<Result<Emitted, EmitError>>,
}

type Queue = Arc<AsyncMutex<mpsc::Receiver<Waiting>>>;

/// Emits of this process, on one database.
pub struct Emits {
    pub(crate) sender: Sender,
    pub(crate) wake: Wake,
    pool: Pool,
    queue: mpsc::Sender<Waiting>,
    /// Until the first emit, which is inside a runtime.
    idle: Mutex<Option<mpsc::Receiver<Waiting>>>,
}

impl Emits {
    pub fn new(pool: Pool, wake: Wake) -> Self {
        let (queue, waiting) = mpsc::channel(WAITING_MAX);
        Self {
            sender: Sender::default(),
            wake,
            pool,
            queue,
            idle: Mutex::new(Some(waiting)),
        }
    }

    /// In the transaction of whoever else is there. Returns when that has committed.
    pub(crate) async fn emit(&self, event: OwnedEvent) -> Result<Emitted, EmitError> {
        self.start();
        let (answer, answered) = oneshot::channel();
        let stopped = || EmitError::Database(sqlx::Error::PoolClosed);
        self.queue
            .send(Waiting { event, answer })
            .await
            .map_err(|_| stopped())?;
        answered.await.unwrap_or_else(|_| Err(stopped()))
    }

    fn start(&self) {
        let waiting = match self.idle.lock() {
            Ok(mut idle) => idle.take(),
            Err(_) => None,
        };
        let Some(waiting) = waiting else { return };
        let queue: Queue = Arc::new(AsyncMutex::new(waiting));
        for _ in 0..GROUPS_AT_ONCE {
            let worker = Worker {
                pool: self.pool.clone(),
                sender: self.sender.clone(),
                wake: self.wake.clone(),
            };
            tokio::spawn(worker.run(queue.clone()));
        }
    }
}

#[derive(Clone)]
struct Worker {
    pool: Pool,
    sender: Sender,
    wake: Wake,
}

impl Worker {
    /// Ends with the last `Emits`.
    async fn run(self, queue: Queue) {
        loop {
            let mut group = Vec::with_capacity(GROUP_MAX);
            if queue.lock().await.recv_many(&mut group, GROUP_MAX).await == 0 {
                return;
            }
            self.emit_together(group).await;
        }
    }

    async fn emit_together(&self, group: Vec<Waiting>) {
        match self.try_together(&group).await {
            Ok(answers) => {
                self.wake.now();
                for (waiting, answer) in group.into_iter().zip(answers) {
                    match answer {
                        Err(EmitError::Stale) => self.start_alone(waiting),
                        // Whoever asked may have gone.
                        answer => drop(waiting.answer.send(answer)),
                    }
                }
            }
            // The server says that nothing was done.
            Err(sqlx::Error::Database(error)) => {
                tracing::debug!(%error, members = group.len(), "a group of emits is taken apart");
                for waiting in group {
                    self.start_alone(waiting);
                }
            }
            // Whether it was committed is not known: an event without an id must not be emitted again.
            Err(error) => {
                tracing::warn!(%error, members = group.len(), "a group of emits failed");
                for waiting in group {
                    let lost = sqlx::Error::Io(ErrorKind::ConnectionAborted.into());
                    let _ = waiting.answer.send(Err(lost.into()));
                }
            }
        }
    }

    /// One statement, which is a transaction of its own: no more round trips than a single event needs.
    async fn try_together(&self, group: &[Waiting]) -> Result<Vec<Result<Emitted, EmitError>>, sqlx::Error> {
        let events: Vec<NewEvent<'_>> = group.iter().map(|waiting| waiting.event.borrow()).collect();
        let mut held = self.pool.acquire().await?;
        let together = async {
            let answers = self.sender.emit_all(&mut held, &events, Patience::Short).await?;
            held.done().await?;
            Ok(answers)
        };
        let began = Instant::now();
        let answers = timeout(GROUP_TIME_MAX, together)
            .await
            .unwrap_or_else(|_| Err(sqlx::Error::Io(ErrorKind::TimedOut.into())))?;
        METERS.statement(events.len(), began.elapsed());
        Ok(answers)
    }

    /// Without holding up the next group.
    fn start_alone(&self, waiting: Waiting) {
        let worker = self.clone();
        tokio::spawn(async move {
            let answer = worker.emit_alone(&waiting.event).await;
            let _ = waiting.answer.send(answer);
        });
    }

    async fn emit_alone(&self, event: &OwnedEvent) -> Result<Emitted, EmitError> {
        let mut transaction = tables::begin(&self.pool).await?;
        let emitted = self.sender.emit(&mut transaction, &event.borrow()).await?;
        transaction.commit().await?;
        self.wake.now();
        Ok(emitted)
    }
}
