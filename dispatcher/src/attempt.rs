//! One attempt as a pipeline: body, signature, request, decision, record. No transaction is open across the network.
//! Picked by `engine.rs`, recorded by `record.rs`.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use postrider_proto::{
    DeliveryId, EndpointId, Epoch, EventId, Outcome, OutcomeKind, signature,
    trace::{TraceContext, TraceState},
};
use postrider_sender::{read_data, read_data_of_body};
use sqlx::{PgConnection, postgres::PgConnectOptions};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    answer::Answered,
    clock::Clock,
    endpoint::Endpoint,
    engine::Event,
    hands::Hands,
    job::Job,
    lane::{Pace, Verdict},
    lease::{Lease, Right},
    line::Line,
    meters::METERS,
    places::SLOW,
    record::Finished,
    retry::{self, Jitter, Next},
    send::{Request, Sender, webhook_headers},
    traces::{Made, Tracer},
};

/// Bodies read by one statement. One is under way at a time: what is picked meanwhile goes with the next.
const BODIES_MAX: usize = 256;
/// Attempts of lanes that are not known to be fast begin a few at a time: a thousand that hang would begin, and time out,
/// all at once, and what is fast would wait behind them for the processor.
const CAREFUL_MAX: usize = 16;
const CAREFUL_PAUSE: Duration = Duration::from_millis(2);
/// Bodies in memory, of the lanes of one pace. What hangs and holds its bodies holds up only what may hang too.
const BODY_BYTES_MAX: usize = 48 * 1024 * 1024;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// A delivery that the engine gave a place on the wire.
pub(crate) struct Picked {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) epoch: Epoch,
    /// Of the lease: over when somebody else may own the shard.
    pub(crate) term: CancellationToken,
    pub(crate) job: Job,
    pub(crate) place: Place,
    /// Room for its result.
    pub(crate) room: OwnedSemaphorePermit,
}

/// A place on the wire. However the attempt ends, by an answer, a panic or a lost lease, dropping it tells the engine.
pub(crate) struct Place {
    pub(crate) endpoint: EndpointId,
    pub(crate) event: EventId,
    pub(crate) number: u16,
    pub(crate) events: mpsc::UnboundedSender<Event>,
    pub(crate) verdict: Option<Verdict>,
}

impl Place {
    fn answered(mut self, verdict: Verdict) {
        self.verdict = Some(verdict);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.events.send(Event::Left {
            endpoint: self.endpoint,
            event: self.event,
            number: self.number,
            verdict: self.verdict,
        });
    }
}

/// What every attempt of this process shares.
pub(crate) struct Attempts {
    pub(crate) database: PgConnectOptions,
    pub(crate) sender: Sender,
    pub(crate) clock: Clock,
    pub(crate) lease: Lease,
    pub(crate) jitter: Jitter,
    pub(crate) finished: mpsc::UnboundedSender<Finished>,
    pub(crate) tasks: TaskTracker,
    pub(crate) hands: Hands<Work>,
    pub(crate) tracer: Tracer,
}

/// What a task is given to do.
pub(crate) struct Work {
    picked: Picked,
    /// Unless its event is gone.
    content: Option<Arc<Content>>,
}

/// An event as it is sent. One read serves all its endpoints.
struct Content {
    public_id: String,
    body: Bytes,
    /// The data as it was given, of a thin event.
    full_data: Option<String>,
    /// Where it belongs in its producer's trace; never when traces are off.
    trace: Option<(TraceContext, Option<TraceState>)>,
    /// It has outlived its partition.
    held: bool,
    /// Its share of the memory for bodies.
    _budget: OwnedSemaphorePermit,
}

/// Id, the producer's own id, body, full data, trace.
type StoredRow = (EventId, Option<String>, Vec<u8>, Option<Vec<u8>>, Option<Vec<u8>>);

// A walk for each id, not `= any`: under a generic plan that would scan every partition. The bounds leave out those of other
// days before the first is opened.
const STORED: &str = "select e.*, null::bytea from unnest($1::uuid[]) u(id)
     cross join lateral (
         select e.id, e.chosen_id, e.body, e.full_data from postrider.events e
         where e.id = u.id and e.id >= $2 and e.id <= $3 limit 1
     ) e";
const STORED_WITH_TRACE: &str = "select e.*, t.context from unnest($1::uuid[]) u(id)
     cross join lateral (
         select e.id, e.chosen_id, e.body, e.full_data from postrider.events e
         where e.id = u.id and e.id >= $2 and e.id <= $3 limit 1
     ) e
     left join postrider.traces t on t.event_id = u.id";

impl Attempts {
    /// Takes what was picked of lanes of one pace, reads bodies in batches and starts an attempt for each. Ends with the
    /// engine.
    pub(crate) async fn run(self: Arc<Self>, pace: Pace, mut picked: mpsc::UnboundedReceiver<Picked>) {
        let mut line = Line::new(self.database.clone());
        let budget = Arc::new(Semaphore::new(BODY_BYTES_MAX));
        let (most, pause) = match pace {
            Pace::Fast => (BODIES_MAX, None),
            Pace::Slow | Pace::Unknown => (CAREFUL_MAX, Some(CAREFUL_PAUSE)),
        };
        let mut batch = Vec::with_capacity(most);
        while picked.recv_many(&mut batch, most).await > 0 {
            self.start(std::mem::take(&mut batch), &mut line, &budget).await;
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
        }
    }

    async fn start(self: &Arc<Self>, batch: Vec<Picked>, line: &mut Line, budget: &Arc<Semaphore>) {
        let contents = match contents(&batch, line, budget, self.tracer.is_on()).await {
            Ok(contents) => contents,
            Err(error) => {
                line.close();
                // The places are dropped, and with that the deliveries handed back.
                tracing::warn!(%error, "bodies could not be read; the deliveries wait");
                tokio::time::sleep(Duration::from_millis(100)).await;
                return;
            }
        };
        for picked in batch {
            let content = contents.get(&picked.job.event).cloned();
            if let Err(work) = self.hands.offer(Work { picked, content }) {
                self.tasks.spawn(self.clone().work(work));
            }
        }
    }

    async fn work(self: Arc<Self>, first: Work) {
        let mut next = Some(first);
        while let Some(work) = next {
            self.make(work).await;
            next = self.hands.next().await;
        }
    }

    async fn make(&self, Work { picked, content }: Work) {
        let Picked {
            endpoint,
            epoch,
            term,
            job,
            place,
            room,
        } = picked;
        let started_at = self.clock.now();
        let began = Instant::now();
        let mut sent_signature = None;
        let held = content.as_ref().is_some_and(|content| content.held);
        if let Some(content) = &content
            && !is_wanted(&endpoint, &job, content)
        {
            place.answered(Verdict {
                success: true,
                slow: false,
                its_own: true,
            });
            let _ = self.finished.send(Finished {
                endpoint: endpoint.id,
                event: job.event,
                shard: endpoint.shard,
                epoch,
                number: job.number(),
                started_at,
                duration: Duration::ZERO,
                signature: None,
                outcome: Outcome::NotSent {
                    error: "the endpoint's filter does not want it".to_owned(),
                },
                next: Next::Filtered,
                held,
                room,
            });
            return;
        }
        let delivery = DeliveryId {
            event: job.event,
            endpoint: endpoint.id,
        };
        let traced = self.tracer.attempt_begins(
            delivery,
            content
                .as_ref()
                .and_then(|content| content.trace.as_ref())
                .map(|trace| trace.0),
            job.replay.is_some(),
        );
        let outcome = match &content {
            None => Outcome::NotSent {
                error: "the event is past its retention: its body is gone".to_owned(),
            },
            Some(content) => {
                let t = started_at.timestamp();
                let secrets = endpoint.secrets_in_force(started_at);
                let value = signature::sign(endpoint.format, &content.public_id, t, &content.body, &secrets);
                let right = self.lease.under(term);
                let mut request = self.request(&endpoint, &job, content, t, &value, right.clone());
                if let Some(traced) = &traced
                    && let Ok(value) = HeaderValue::from_str(&traced.context.to_string())
                {
                    request.headers.insert(TRACEPARENT, value);
                    if let Some((_, Some(state))) = &content.trace
                        && let Ok(value) = HeaderValue::from_str(state.as_str())
                    {
                        request.headers.insert(TRACESTATE, value);
                    }
                }
                sent_signature = Some(value);
                // Checked last: when the lease ran out or the settings were replaced while the body was read, nothing
                // is sent.
                if !right.is_valid() || !endpoint.may_start() {
                    return;
                }
                match right.only_while_valid(self.sender.send(request)).await {
                    Some(outcome) => outcome,
                    // Somebody else may own the shard by now. The attempt counts for nothing.
                    None => return,
                }
            }
        };
        if matches!(outcome, Outcome::Forbidden { .. }) {
            sent_signature = None;
        }
        let next = retry::decide(
            &outcome,
            job.step,
            job.number(),
            &endpoint.schedule,
            self.jitter,
            &mut rand::rng(),
        );
        let duration = began.elapsed();
        METERS.attempted(outcome.kind(), duration);
        if job.attempt == 0 && job.replay.is_none() {
            METERS.first_attempt(job.event.unix_ms(), started_at);
        }
        if let Some(traced) = &traced {
            let made = Made {
                public_id: content.as_ref().map_or("", |content| &content.public_id),
                host: endpoint.url.host_str(),
                number: job.number(),
                began: started_at,
                took: duration,
                outcome: &outcome,
            };
            self.tracer.attempt_ended(traced, &made);
        }
        if !outcome.is_success() {
            let public_id = content.as_ref().map(|content| content.public_id.as_str());
            log_failure(public_id, delivery, job.number(), &outcome, next);
        }
        let verdict = Verdict {
            success: outcome.is_success(),
            slow: duration > SLOW,
            its_own: outcome.kind() != OutcomeKind::ProxyFailed,
        };
        let finished = Finished {
            endpoint: endpoint.id,
            event: job.event,
            shard: endpoint.shard,
            epoch,
            number: job.number(),
            started_at,
            duration,
            signature: sent_signature,
            outcome,
            next,
            held,
            room,
        };
        // The place first: the engine must hear of the answer before it hears of the record.
        place.answered(verdict);
        let _ = self.finished.send(finished);
    }

    fn request<'a>(
        &self,
        endpoint: &'a Endpoint,
        job: &Job,
        content: &Content,
        t: i64,
        signature: &str,
        right: Right,
    ) -> Request<'a> {
        let mut headers = webhook_headers(&content.public_id, t, signature);
        for (name, value) in &endpoint.headers {
            headers.insert(name.clone(), value.clone());
        }
        if let Some(replay) = job
            .replay
            .as_deref()
            .and_then(|id| HeaderValue::from_str(id).ok())
        {
            headers.insert(HeaderName::from_static("webhook-replay"), replay);
        }
        Request {
            url: &endpoint.url,
            headers,
            body: content.body.clone(),
            timeout: endpoint.timeout,
            tls: endpoint.tls.as_ref(),
            right: Some(right),
        }
    }
}

async fn contents(
    batch: &[Picked],
    line: &mut Line,
    budget: &Arc<Semaphore>,
    with_traces: bool,
) -> Result<HashMap<EventId, Arc<Content>>, sqlx::Error> {
    let mut ids: Vec<EventId> = batch.iter().map(|picked| picked.job.event).collect();
    ids.sort_unstable();
    ids.dedup();
    let (Some(first), Some(last)) = (ids.first(), ids.last()) else {
        return Ok(HashMap::new());
    };
    let connection = line.open().await?;
    let statement = match with_traces {
        true => STORED_WITH_TRACE,
        false => STORED,
    };
    let rows: Vec<StoredRow> = sqlx::query_as(statement)
        .bind(&ids)
        .bind(first)
        .bind(last)
        .fetch_all(&mut *connection)
        .answered()
        .await?;
    let held = match rows.len() < ids.len() {
        true => held(connection, &ids, &rows, with_traces).await?,
        false => Vec::new(),
    };
    let mut contents = HashMap::with_capacity(rows.len() + held.len());
    let first_held = rows.len();
    for (index, (id, chosen_id, body, full_data, trace)) in rows.into_iter().chain(held).enumerate() {
        let bytes = body.len() + full_data.as_ref().map_or(0, Vec::len);
        let share = budget.clone().acquire_many_owned(bytes as u32).await;
        let Ok(share) = share else { continue };
        let public_id = chosen_id.unwrap_or_else(|| id.generated());
        contents.insert(
            id,
            Arc::new(Content {
                public_id,
                body: body.into(),
                full_data: full_data.and_then(|data| String::from_utf8(data).ok()),
                trace: trace.and_then(|bytes| TraceContext::from_bytes(&bytes)),
                held: index >= first_held,
                _budget: share,
            }),
        );
    }
    Ok(contents)
}

/// Events whose partition is gone while deliveries of them wait.
async fn held(
    connection: &mut PgConnection,
    ids: &[EventId],
    found: &[StoredRow],
    with_traces: bool,
) -> Result<Vec<StoredRow>, sqlx::Error> {
    let found: HashSet<EventId> = found.iter().map(|row| row.0).collect();
    let missing: Vec<EventId> = ids.iter().copied().filter(|id| !found.contains(id)).collect();
    sqlx::query_as(
        "select e.id, e.chosen_id, e.body, e.full_data,
                case when $2 then (select t.context from postrider.traces t where t.event_id = e.id) end
         from unnest($1::uuid[]) u(id) join postrider.events_held e on e.id = u.id",
    )
    .bind(missing)
    .bind(with_traces)
    .fetch_all(connection)
    .answered()
    .await
}

/// The one line of a failed attempt. Most are followed by another attempt and are told only to those who ask for them: an
/// endpoint that is away would fill the log.
fn log_failure(event: Option<&str>, delivery: DeliveryId, attempt: u16, outcome: &Outcome, next: Next) {
    let (kind, status, error) = (outcome.kind().as_str(), outcome.status(), outcome.error());
    match next {
        Next::Dead(reason) => tracing::info!(
            event, %delivery, attempt, outcome = kind, status, error, reason = reason.as_str(),
            "an attempt failed, and the delivery is dead"
        ),
        Next::Retry { wait, .. } => tracing::debug!(
            event, %delivery, attempt, outcome = kind, status, error, next_in_ms = wait.as_millis() as u64,
            "an attempt failed"
        ),
        Next::Delivered | Next::Filtered => {}
    }
}

/// Asked once, before the first attempt: what was tried before is sent whatever the filter says by now.
/// Data that can't be read as values, which only SQL lets in, is sent too: nothing is lost because of a filter.
fn is_wanted(endpoint: &Endpoint, job: &Job, content: &Content) -> bool {
    let Some(filter) = &endpoint.filter else {
        return true;
    };
    if job.attempt > 0 {
        return true;
    }
    let data = match &content.full_data {
        Some(data) => read_data(data),
        None => read_data_of_body(&content.body),
    };
    data.is_none_or(|data| filter.admits(&data))
}
