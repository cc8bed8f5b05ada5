//! One attempt as a pipeline: body, signature, request, decision, record. No transaction is open across the network.
//! Picked by `engine.rs`, recorded by `record.rs`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use postrider_proto::{DeliveryId, EndpointId, Epoch, EventId, Outcome, OutcomeKind, signature};
use postrider_sender::{read_data, read_data_of_body};
use sqlx::postgres::PgConnectOptions;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    clock::Clock,
    dedicated_connection::DedicatedConnection,
    deliver::{
        bodies::{self, Content, LargeBodies, SMALL_BYTES_MAX, Stored},
        capacity::SLOW,
        division::Holder,
        endpoint::Endpoint,
        engine::EngineMessage,
        fair_queue::FairShare,
        lane::{Pace, Verdict},
        queued_delivery::QueuedDelivery,
        recorder::Finished,
        retry::{self, Jitter, Next},
        round_robin::RoundRobin,
        worker_pool::WorkerPool,
    },
    http::client::{HttpSender, Request, webhook_headers},
    ownership::lease::{Lease, Right},
    store::transitions::AttemptResult,
    telemetry::{
        metrics::METERS,
        traces::{Made, Tracer},
    },
};

/// Bodies read by one statement. One is under way at a time: what is picked meanwhile goes with the next.
const BODIES_MAX: usize = 256;
/// Attempts of lanes that are not known to be fast begin a few at a time: a thousand that hang would begin, and time out,
/// all at once, and what is fast would wait behind them for the processor.
const CAREFUL_MAX: usize = 16;
/// Picked deliveries taken from the engine at a time. Their number is bounded by the capacity they were picked under.
const ARRIVED_MAX: usize = 256;
const CAREFUL_PAUSE: Duration = Duration::from_millis(2);
/// Before a delivery_id that could not be sent for a fault of our own is handed back.
const AFTER_OWN_FAULT: Duration = Duration::from_secs(1);
/// After bodies could not be read.
const READ_AGAIN: Duration = Duration::from_millis(100);

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// A delivery_id that the engine gave a place on the wire.
pub(crate) struct Picked {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) epoch: Epoch,
    /// Of the lease: over when somebody else may own the shard.
    pub(crate) term: CancellationToken,
    pub(crate) delivery: QueuedDelivery,
    pub(crate) place: InFlightGuard,
    /// Room for its result.
    pub(crate) room: OwnedSemaphorePermit,
}

/// A place on the wire. However the attempt ends, by an answer, a panic or a lost lease, dropping it tells the engine.
pub(crate) struct InFlightGuard {
    pub(crate) endpoint: EndpointId,
    pub(crate) epoch: Epoch,
    pub(crate) event: EventId,
    pub(crate) number: u16,
    pub(crate) events: mpsc::UnboundedSender<EngineMessage>,
    pub(crate) verdict: Option<Verdict>,
}

impl InFlightGuard {
    fn answered(mut self, verdict: Verdict) {
        self.verdict = Some(verdict);
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let _ = self.events.send(EngineMessage::Left {
            endpoint: self.endpoint,
            epoch: self.epoch,
            event: self.event,
            number: self.number,
            verdict: self.verdict,
        });
    }
}

/// What every attempt of this process shares.
pub(crate) struct Attempts {
    pub(crate) database: PgConnectOptions,
    pub(crate) sender: HttpSender,
    pub(crate) clock: Clock,
    pub(crate) lease: Lease,
    pub(crate) jitter: Jitter,
    pub(crate) finished: mpsc::UnboundedSender<Finished>,
    pub(crate) tasks: TaskTracker,
    pub(crate) workers: WorkerPool<AttemptTask>,
    pub(crate) large_bodies: LargeBodies,
    pub(crate) tracer: Tracer,
}

/// What a task is given to do.
pub(crate) struct AttemptTask {
    picked: Picked,
    content: Fetch,
}

/// How an attempt comes by its event.
enum Fetch {
    /// The event is past its retention.
    Gone,
    Read(Arc<Content>),
    /// It is read by the attempt itself, once there is memory for so many bytes.
    Large(usize),
}

impl Attempts {
    /// Takes what was picked of lanes of one pace, reads bodies in batches and starts an attempt for each. Endpoints take
    /// turns, so that the burst of one keeps no other waiting. Ends with the engine.
    pub(crate) async fn run(self: Arc<Self>, pace: Pace, mut picked: mpsc::UnboundedReceiver<Picked>) {
        let mut line = DedicatedConnection::new(self.database.clone());
        let (most, pause) = match pace {
            Pace::Fast => (BODIES_MAX, None),
            Pace::Slow | Pace::Unknown => (CAREFUL_MAX, Some(CAREFUL_PAUSE)),
        };
        let mut arrived = Vec::with_capacity(most);
        let mut backlog = RoundRobin::default();
        while !backlog.is_empty() || picked.recv_many(&mut arrived, ARRIVED_MAX).await > 0 {
            // What came while the last batch was read takes its turn with what is left of it.
            while let Ok(one) = picked.try_recv() {
                arrived.push(one);
            }
            let batch = if backlog.is_empty() && arrived.len() <= most {
                std::mem::take(&mut arrived)
            } else {
                for one in arrived.drain(..) {
                    backlog.push(one.endpoint.id, one);
                }
                std::iter::from_fn(|| backlog.pop()).take(most).collect()
            };
            self.start(batch, &mut line).await;
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
        }
    }

    async fn start(self: &Arc<Self>, batch: Vec<Picked>, line: &mut DedicatedConnection) {
        let mut ids: Vec<EventId> = batch.iter().map(|picked| picked.delivery.event).collect();
        ids.sort_unstable();
        ids.dedup();
        let read =
            async { bodies::read(line.open().await?, &ids, SMALL_BYTES_MAX, self.tracer.is_on()).await };
        let stored = match read.await {
            Ok(stored) => stored,
            Err(error) => {
                line.close();
                // The places are dropped, and with that the deliveries handed back.
                tracing::warn!(%error, "bodies could not be read; the deliveries wait");
                tokio::time::sleep(READ_AGAIN).await;
                return;
            }
        };
        for picked in batch {
            let content = match stored.get(&picked.delivery.event) {
                None => Fetch::Gone,
                Some(Stored::Small(content)) => Fetch::Read(content.clone()),
                Some(Stored::Large(bytes)) => Fetch::Large(*bytes),
            };
            if let Err(work) = self.workers.offer(AttemptTask { picked, content }) {
                self.tasks.spawn(self.clone().work(work));
            }
        }
    }

    /// The event's content and the memory it is held in. Nothing when the attempt can't be made now.
    async fn content(
        &self,
        picked: &Picked,
        fetch: Fetch,
    ) -> Option<(Option<Arc<Content>>, Option<FairShare>)> {
        let bytes = match fetch {
            Fetch::Gone => return Some((None, None)),
            Fetch::Read(content) => return Some((Some(content), None)),
            Fetch::Large(bytes) => bytes,
        };
        let holder = Holder {
            endpoint: picked.endpoint.id,
            tenant: picked.delivery.tenant,
        };
        let share = tokio::select! {
            share = self.large_bodies.share(holder, bytes) => share,
            // Nothing may be sent any more: whoever owns the endpoint next reads it again.
            () = picked.term.cancelled() => return None,
        };
        let read = tokio::select! {
            read = self.large_bodies.read(holder, picked.delivery.event) => read,
            () = picked.term.cancelled() => return None,
        };
        match read {
            Ok(content) => Some((content, Some(share))),
            Err(error) => {
                drop(share);
                tracing::warn!(%error, "a body could not be read; the delivery waits");
                tokio::time::sleep(READ_AGAIN).await;
                None
            }
        }
    }

    async fn work(self: Arc<Self>, first: AttemptTask) {
        let mut next = Some(first);
        while let Some(work) = next {
            self.make(work).await;
            next = self.workers.next().await;
        }
    }

    async fn make(&self, AttemptTask { picked, content }: AttemptTask) {
        let Some((content, share)) = self.content(&picked, content).await else {
            return;
        };
        let Picked {
            endpoint,
            epoch,
            term,
            delivery,
            place,
            room,
        } = picked;
        let started_at = self.clock.now();
        let began = Instant::now();
        let mut sent_signature = None;
        let archived = content.as_ref().is_some_and(|content| content.held);
        let public_id = content.as_ref().map(|content| content.public_id.clone());
        if let Some(content) = &content
            && !is_wanted(&endpoint, &delivery, content)
        {
            place.answered(Verdict {
                success: true,
                slow: false,
                its_own: true,
            });
            let _ = self.finished.send(Finished {
                result: AttemptResult {
                    endpoint: endpoint.id,
                    event: delivery.event,
                    shard: endpoint.shard,
                    epoch,
                    number: delivery.number(),
                    started_at,
                    duration: Duration::ZERO,
                    signature: None,
                    outcome: Outcome::NotSent {
                        error: "the endpoint's filter does not want it".to_owned(),
                    },
                    next: Next::Filtered,
                    archived,
                },
                room,
            });
            return;
        }
        let delivery_id = DeliveryId {
            event: delivery.event,
            endpoint: endpoint.id,
        };
        let traced = self.tracer.attempt_begins(
            delivery_id,
            content
                .as_ref()
                .and_then(|content| content.trace.as_ref())
                .map(|trace| trace.0),
            delivery.replay.is_some(),
        );
        let outcome = match content {
            None => Outcome::NotSent {
                error: "the event is past its retention: its body is gone".to_owned(),
            },
            Some(content) => {
                let t = started_at.timestamp();
                let secrets = endpoint.secrets_in_force(started_at);
                let value = signature::sign(endpoint.format, &content.public_id, t, &content.body, &secrets);
                let right = self.lease.under(term);
                let mut request = self.request(&endpoint, &delivery, &content, t, &value, right.clone());
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
                request.body = bodies::lent(content, share);
                // Checked last: when the lease ran out or the settings were replaced while the body was read, nothing
                // is sent.
                if !right.is_valid() || !endpoint.may_start() {
                    return;
                }
                match right.only_while_valid(self.sender.send(request)).await {
                    Some(Ok(outcome)) => outcome,
                    // Says nothing about the endpoint, and nothing was sent. The attempt counts for nothing.
                    Some(Err(fault)) => {
                        METERS.own_faults.increment(1);
                        tracing::error!(error = %fault, "a request could not be sent for a fault on this side");
                        return tokio::time::sleep(AFTER_OWN_FAULT).await;
                    }
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
            delivery.step,
            delivery.number(),
            &endpoint.schedule,
            self.jitter,
            &mut rand::rng(),
        );
        let duration = began.elapsed();
        METERS.attempted(outcome.kind(), duration);
        if delivery.attempt == 0 && delivery.replay.is_none() {
            METERS.first_attempt(delivery.event.unix_ms(), started_at);
        }
        if let Some(traced) = &traced {
            let made = Made {
                public_id: public_id.as_deref().unwrap_or_default(),
                host: endpoint.url.host_str(),
                number: delivery.number(),
                began: started_at,
                took: duration,
                outcome: &outcome,
            };
            self.tracer.attempt_ended(traced, &made);
        }
        if !outcome.is_success() {
            log_failure(
                public_id.as_deref(),
                delivery_id,
                delivery.number(),
                &outcome,
                next,
            );
        }
        let verdict = Verdict {
            success: outcome.is_success(),
            slow: duration > SLOW,
            its_own: outcome.kind() != OutcomeKind::ProxyFailed,
        };
        let finished = Finished {
            result: AttemptResult {
                endpoint: endpoint.id,
                event: delivery.event,
                shard: endpoint.shard,
                epoch,
                number: delivery.number(),
                started_at,
                duration,
                signature: sent_signature,
                outcome,
                next,
                archived,
            },
            room,
        };
        // The place first: the engine must hear of the answer before it hears of the record.
        place.answered(verdict);
        let _ = self.finished.send(finished);
    }

    fn request<'a>(
        &self,
        endpoint: &'a Endpoint,
        delivery: &QueuedDelivery,
        content: &Content,
        t: i64,
        signature: &str,
        right: Right,
    ) -> Request<'a> {
        let mut headers = webhook_headers(&content.public_id, t, signature);
        for (name, value) in &endpoint.headers {
            headers.insert(name.clone(), value.clone());
        }
        if let Some(replay) = delivery
            .replay
            .as_deref()
            .and_then(|id| HeaderValue::from_str(id).ok())
        {
            headers.insert(HeaderName::from_static("webhook-replay"), replay);
        }
        Request {
            url: &endpoint.url,
            headers,
            body: Bytes::new(),
            timeout: endpoint.timeout,
            tls: endpoint.tls.as_ref(),
            right: Some(right),
        }
    }
}

/// The one line of a failed attempt. Most are followed by another attempt and are told only to those who ask for them: an
/// endpoint that is away would fill the log.
fn log_failure(event: Option<&str>, delivery_id: DeliveryId, attempt: u16, outcome: &Outcome, next: Next) {
    let (kind, status, error) = (outcome.kind().as_str(), outcome.status(), outcome.error());
    match next {
        Next::Dead(reason) => tracing::info!(
            event, %delivery_id, attempt, outcome = kind, status, error, reason = reason.as_str(),
            "an attempt failed, and the delivery is dead"
        ),
        Next::Retry { wait, .. } => tracing::debug!(
            event, %delivery_id, attempt, outcome = kind, status, error, next_in_ms = wait.as_millis() as u64,
            "an attempt failed"
        ),
        Next::Delivered | Next::Filtered => {}
    }
}

/// Asked once, before the first attempt: what was tried before is sent whatever the filter says by now.
/// Data that can't be read as values, which only SQL lets in, is sent too: nothing is lost because of a filter.
fn is_wanted(endpoint: &Endpoint, delivery: &QueuedDelivery, content: &Content) -> bool {
    let Some(filter) = &endpoint.filter else {
        return true;
    };
    if delivery.attempt > 0 {
        return true;
    }
    let data = match &content.full_data {
        Some(data) => read_data(data),
        None => read_data_of_body(&content.body),
    };
    data.is_none_or(|data| filter.admits(&data))
}
