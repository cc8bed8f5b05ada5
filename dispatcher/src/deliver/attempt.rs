//! One attempt as a pipeline: body, signature, request, decision, record. No transaction is open across the network.
//! Deliveries are picked by `engine.rs`; results are written by `recorder.rs`.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{
    DeliveryId, EndpointId, Epoch, EventId, Outcome, OutcomeKind, TenantId, Timing, signature,
};
use postrider_sender::{read_data, read_data_of_body};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    clock::Clock,
    connector::Connector,
    dedicated_connection::DedicatedConnection,
    deliver::{
        bodies::{self, Content, LargeBodies, Prefetched, SMALL_BYTES_MAX, Stored},
        capacity::SLOW,
        division::Holder,
        endpoint::Endpoint,
        engine::EngineMessage,
        fair_queue::FairShare,
        lane::{AttemptResult, Pace},
        queued_delivery::QueuedDelivery,
        recorder::Finished,
        retry::{self, Jitter, Next},
        round_robin::RoundRobin,
        sending_switch::SendingSwitch,
        worker_pool::WorkerPool,
    },
    health::database::warn_unless_outage,
    http::{
        client::{HttpSender, Request},
        headers::{Marker, RequestHeaders},
    },
    ownership::lease::Lease,
    store::transitions::AttemptRecord,
    telemetry::{
        metrics::METRICS,
        traces::{self, AttemptDetails, Tracer},
    },
};

/// Bodies read by one statement. One read runs at a time; deliveries picked meanwhile join the next batch.
const BODIES_MAX: usize = 256;
/// Attempts of lanes not known to be fast start in small groups: a thousand hanging endpoints would otherwise start,
/// and time out, all at once and take the CPU from fast ones.
const CAREFUL_MAX: usize = 16;
/// Picked deliveries received from the engine at a time. Capacity bounds their number.
const ARRIVED_MAX: usize = 256;
const CAREFUL_PAUSE: Duration = Duration::from_millis(2);
/// Delay before a delivery that failed because of a local fault is handed back.
const LOCAL_FAULT_DELAY: Duration = Duration::from_secs(1);
/// Back-off after a failed read of bodies.
const READ_AGAIN: Duration = Duration::from_millis(100);

/// A delivery that the engine admitted for sending.
pub(crate) struct Picked {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) epoch: Epoch,
    /// Term of the lease: cancelled when another dispatcher may own the shard.
    pub(crate) term: CancellationToken,
    pub(crate) delivery: QueuedDelivery,
    pub(crate) guard: InFlightGuard,
    /// Permit for its unrecorded result.
    pub(crate) result_permit: OwnedSemaphorePermit,
}

impl Picked {
    fn delivery_id(&self) -> DeliveryId {
        DeliveryId {
            event: self.delivery.event,
            endpoint: self.endpoint.id,
        }
    }
}

/// Held while an attempt is in flight. Dropping it notifies the engine however the attempt ends: response, panic or
/// lost lease.
pub(crate) struct InFlightGuard {
    pub(crate) endpoint: EndpointId,
    pub(crate) epoch: Epoch,
    pub(crate) event: EventId,
    pub(crate) number: u16,
    pub(crate) engine: mpsc::UnboundedSender<EngineMessage>,
    pub(crate) result: Option<AttemptResult>,
}

impl InFlightGuard {
    fn finish(mut self, result: AttemptResult) {
        self.result = Some(result);
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let _ = self.engine.send(EngineMessage::AttemptEnded {
            endpoint: self.endpoint,
            epoch: self.epoch,
            event: self.event,
            number: self.number,
            result: self.result,
        });
    }
}

/// Shared by every attempt of this process.
pub(crate) struct Attempts {
    pub(crate) database: Connector,
    pub(crate) sender: HttpSender,
    pub(crate) clock: Clock,
    pub(crate) lease: Lease,
    pub(crate) switch: SendingSwitch,
    pub(crate) jitter: Jitter,
    pub(crate) finished: mpsc::UnboundedSender<Finished>,
    pub(crate) tasks: TaskTracker,
    pub(crate) workers: WorkerPool<AttemptTask>,
    pub(crate) large_bodies: LargeBodies,
    pub(crate) prefetched: Prefetched,
    pub(crate) tracer: Tracer,
}

/// Input of one attempt task. Without an event: it is past its retention.
pub(crate) struct AttemptTask {
    picked: Picked,
    stored: Option<Stored>,
}

/// What became of the request, and the signature it was sent with.
struct Sent {
    outcome: Outcome,
    signature: Option<String>,
    timing: Timing,
}

impl Sent {
    fn nothing(error: &str) -> Self {
        let (error, signature) = (error.to_owned(), None);
        let outcome = Outcome::NotSent { error };
        Self {
            outcome,
            signature,
            timing: Timing::default(),
        }
    }
}

impl Attempts {
    /// Receives the deliveries picked for lanes of one pace, reads bodies in batches and starts an attempt for each.
    /// Endpoints are served round-robin so that a burst of one does not delay the others. Ends with the engine.
    pub(crate) async fn run(self: Arc<Self>, pace: Pace, mut picked: mpsc::UnboundedReceiver<Picked>) {
        let mut connection = DedicatedConnection::new(self.database.clone());
        let (most, pause) = match pace {
            Pace::Fast => (BODIES_MAX, None),
            Pace::Slow | Pace::Unknown => (CAREFUL_MAX, Some(CAREFUL_PAUSE)),
        };
        let mut arrived = Vec::with_capacity(most);
        let mut backlog = RoundRobin::default();
        while !backlog.is_empty() || picked.recv_many(&mut arrived, ARRIVED_MAX).await > 0 {
            // Deliveries that arrived during the last read are interleaved with the backlog.
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
            self.start(batch, &mut connection).await;
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
        }
    }

    async fn start(self: &Arc<Self>, batch: Vec<Picked>, connection: &mut DedicatedConnection) {
        let mut events: Vec<(EventId, TenantId)> = batch
            .iter()
            .map(|picked| (picked.delivery.event, picked.delivery.tenant))
            .collect();
        events.sort_unstable();
        events.dedup();
        let mut stored = self.prefetched.find(&mut events);
        let read = async {
            if events.is_empty() {
                return Ok(HashMap::new());
            }
            let connection = connection.open().await?;
            bodies::read(connection, &events, SMALL_BYTES_MAX, self.tracer.is_on()).await
        };
        match read.await {
            Ok(read) => stored.extend(read),
            Err(error) => {
                connection.close();
                // Dropping the guards hands the deliveries back.
                warn_unless_outage!(error, "reading event bodies failed; retrying");
                tokio::time::sleep(READ_AGAIN).await;
                return;
            }
        }
        for picked in batch {
            let stored = stored.get(&picked.delivery.event).cloned();
            if let Err(work) = self.workers.offer(AttemptTask { picked, stored }) {
                self.tasks.spawn(self.clone().work(work));
            }
        }
    }

    /// The event's content and its share of memory. A large one is read once enough memory is available. `None` when the
    /// attempt can't be made now.
    async fn content(
        &self,
        picked: &Picked,
        stored: Option<Stored>,
    ) -> Option<(Option<Arc<Content>>, Option<FairShare>)> {
        let bytes = match stored {
            None => return Some((None, None)),
            Some(Stored::Small(content)) => return Some((Some(content), None)),
            Some(Stored::Large(bytes)) => bytes,
        };
        let holder = Holder {
            endpoint: picked.endpoint.id,
            tenant: picked.delivery.tenant,
        };
        let share = tokio::select! {
            share = self.large_bodies.share(holder, bytes) => share,
            // The lease is lost: the next owner of the endpoint reads the event again.
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
                warn_unless_outage!(error, "reading a large event body failed; retrying");
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

    /// Read, filter, send, decide, report. When nothing may be sent now, the guard hands the delivery back.
    async fn make(&self, AttemptTask { picked, stored }: AttemptTask) {
        let Some((content, share)) = self.content(&picked, stored).await else {
            return;
        };
        let started_at = self.clock.now();
        let began = Instant::now();
        let archived = content.as_ref().is_some_and(|content| content.archived);
        if let Some(content) = &content
            && !is_wanted(&picked.endpoint, &picked.delivery, content)
        {
            let sent = Sent::nothing("excluded by the endpoint's filter");
            return self.finish(picked, started_at, Duration::ZERO, sent, Next::Filtered, archived);
        }
        let public_id = content.as_ref().map(|content| content.public_id.clone());
        let trace = content.as_ref().and_then(|content| content.trace.as_ref());
        let replayed = picked.delivery.replay.is_some();
        let traced = self.tracer.attempt_begins(
            picked.delivery_id(),
            trace.map(|trace| trace.0),
            started_at,
            replayed,
        );
        let sent = match content {
            None => Sent::nothing("the event has exceeded its retention and its body was deleted"),
            Some(content) => {
                let sent = self.send(&picked, content, share, started_at, traced.as_ref());
                let Some(sent) = sent.await else { return };
                sent
            }
        };
        let next = retry::decide(
            &sent.outcome,
            picked.delivery.step,
            picked.delivery.number(),
            &picked.endpoint.schedule,
            self.jitter,
            &mut rand::rng(),
        );
        let duration = began.elapsed();
        METRICS.attempted(sent.outcome.kind(), duration);
        if picked.delivery.attempt == 0 && !replayed {
            METRICS.first_attempt(picked.delivery.event.unix_ms(), started_at);
        }
        if next == Next::Delivered && !replayed {
            METRICS.delivered(picked.delivery.event.unix_ms(), started_at, duration);
        }
        if let Some(traced) = &traced {
            let details = AttemptDetails {
                public_id: public_id.as_deref().unwrap_or_default(),
                host: picked.endpoint.url.host_str(),
                number: picked.delivery.number(),
                began: started_at,
                took: duration,
                outcome: &sent.outcome,
            };
            self.tracer.attempt_ended(traced, &details);
        }
        if !sent.outcome.is_success() {
            log_failure(public_id.as_deref(), &picked, &sent.outcome, next);
        }
        self.finish(picked, started_at, duration, sent, next, archived);
    }

    /// Signs and sends. Nothing when the lease or the settings ended meanwhile, or when a local fault kept the request from
    /// being sent: such an attempt is not counted.
    async fn send(
        &self,
        picked: &Picked,
        content: Arc<Content>,
        share: Option<FairShare>,
        started_at: DateTime<Utc>,
        traced: Option<&traces::Attempt>,
    ) -> Option<Sent> {
        let endpoint = &picked.endpoint;
        let t = started_at.timestamp();
        let secrets = endpoint.secrets_in_force(started_at);
        let signature = signature::sign(endpoint.format, &content.public_id, t, &content.body, &secrets);
        let permission = self.lease.under(picked.term.clone());
        let state = content.trace.as_ref().and_then(|(_, state)| state.as_ref());
        let headers = RequestHeaders {
            event_id: &content.public_id,
            unix_seconds: t,
            signature: Some(&signature),
            custom: Some(&endpoint.headers),
            marker: picked.delivery.replay.as_deref().map(Marker::Replay),
            trace: traced.map(|traced| (traced.context, state)),
        };
        let request = Request {
            url: &endpoint.url,
            headers: headers.build(),
            body: bodies::with_share(content, share),
            timeout: endpoint.timeout,
            tls: endpoint.tls.as_ref(),
            permission: Some(permission.clone()),
        };
        // Checked last: nothing may be sent if the lease expired, sending was stopped or the settings were replaced while
        // the body was read.
        if !permission.is_valid() || !self.switch.is_on() || !endpoint.may_start() {
            return None;
        }
        // Without an outcome another dispatcher may own the shard by now.
        let sending = self.sender.send_timed(request);
        let (outcome, timing) = match permission.only_while_valid(sending).await? {
            Ok(sent) => sent,
            Err(fault) => {
                METRICS.own_faults.increment(1);
                tracing::error!(error = %fault, "request not sent because of a local fault");
                tokio::time::sleep(LOCAL_FAULT_DELAY).await;
                return None;
            }
        };
        let was_sent = !matches!(outcome, Outcome::Forbidden { .. });
        Some(Sent {
            outcome,
            signature: was_sent.then_some(signature),
            timing,
        })
    }

    fn finish(
        &self,
        picked: Picked,
        started_at: DateTime<Utc>,
        duration: Duration,
        sent: Sent,
        next: Next,
        archived: bool,
    ) {
        let result = AttemptResult {
            success: sent.outcome.is_success() || next == Next::Filtered,
            slow: duration > SLOW,
            about_endpoint: sent.outcome.kind() != OutcomeKind::ProxyFailed,
        };
        let finished = Finished {
            result: AttemptRecord {
                endpoint: picked.endpoint.id,
                event: picked.delivery.event,
                shard: picked.endpoint.shard,
                epoch: picked.epoch,
                number: picked.delivery.number(),
                started_at,
                duration,
                signature: sent.signature,
                timing: (!sent.outcome.is_success() && sent.timing != Timing::default())
                    .then_some(sent.timing),
                outcome: sent.outcome,
                next,
                archived,
            },
            result_permit: picked.result_permit,
        };
        // The guard first: the engine must process the response before the record.
        picked.guard.finish(result);
        let _ = self.finished.send(finished);
    }
}

/// Logs a failed attempt. Failures that will be retried are logged at debug level: an endpoint that is down would
/// fill the log.
fn log_failure(event: Option<&str>, picked: &Picked, outcome: &Outcome, next: Next) {
    let (delivery, attempt) = (picked.delivery_id(), picked.delivery.number());
    let (tenant, endpoint) = (&*picked.endpoint.tenant_name, &*picked.endpoint.public_id);
    let (kind, status, error) = (outcome.kind().as_str(), outcome.status(), outcome.error());
    match next {
        Next::Dead(reason) => tracing::info!(
            tenant, endpoint, event, %delivery, attempt, outcome = kind, status, error, reason = reason.as_str(),
            "attempt failed; delivery moved to dead letters"
        ),
        Next::Retry { wait, .. } => tracing::debug!(
            tenant, endpoint, event, %delivery, attempt, outcome = kind, status, error,
            next_in_ms = wait.as_millis() as u64,
            "attempt failed"
        ),
        Next::Delivered | Next::Filtered => {}
    }
}

/// The filter applies only before the first attempt; later attempts are sent whatever the filter says by then. Data
/// that can't be parsed, which only SQL producers can emit, is sent too: a filter must not lose events.
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
