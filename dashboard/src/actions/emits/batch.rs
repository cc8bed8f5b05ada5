//! A batch of events, all or none. Errors name each invalid event by its index in the list.

use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use postrider_sender::{EmitError, Emitted, LockWait};
use sqlx::PgConnection;

use super::{OwnedEvent, rules::refusal};
use crate::{
    App,
    http::{
        metrics::METRICS,
        problem::{Fault, Kind, Problem},
        trace_context::Carried,
    },
};

/// Errors reported per event, so that a response about a thousand invalid events stays small.
const FAULTS_PER_EVENT_MAX: usize = 5;

/// An event that would be duplicated if the batch were sent again.
pub(crate) fn unrepeatable(emitted: &[(Emitted, OwnedEvent)]) -> Option<String> {
    let found = emitted.iter().find(|(_, event)| event.id.is_none());
    found.map(|(emitted, _)| emitted.id.clone())
}

/// The events that can be emitted, by index, and the errors of the others.
pub(crate) struct Prepared {
    events: Vec<(usize, OwnedEvent)>,
    refused: Refused,
}

/// Every check that needs no database connection.
pub(crate) async fn prepare(
    app: &App,
    read: Vec<Result<OwnedEvent, Problem>>,
    trace: Option<Carried>,
) -> Result<Prepared, Problem> {
    let mut refused = Refused::default();
    let mut events = Vec::with_capacity(read.len());
    let mut ids = HashMap::new();
    for (index, event) in read.into_iter().enumerate() {
        let event = event.and_then(|event| match &event.id {
            Some(id) => match ids.insert(id.clone(), index) {
                Some(first) => {
                    let detail = format!("has the same id as event {first} of this batch");
                    Err(Problem::invalid("/id", detail))
                }
                None => Ok(event),
            },
            None => Ok(event),
        });
        // A check takes a moment, and there may be a thousand of them.
        tokio::task::yield_now().await;
        let event = match event {
            Ok(event) => app.emits.checks().check(event).await,
            Err(problem) => Err(problem),
        };
        match event {
            Ok(event) => events.push((
                index,
                OwnedEvent {
                    trace: trace.clone(),
                    ..event
                },
            )),
            Err(problem) if problem.status().is_client_error() && problem.kind != Kind::TooMany => {
                refused.add(problem, index);
            }
            // A temporary condition: the whole batch is to be retried.
            Err(problem) => return Err(problem),
        }
    }
    Ok(Prepared { events, refused })
}

/// Runs in the caller's transaction, which is rolled back when an event is rejected. Valid events are tried even if
/// others are invalid, so that the response names every rejected one.
pub(crate) async fn emit_all(
    app: &App,
    connection: &mut PgConnection,
    Prepared { events, mut refused }: Prepared,
) -> Result<Vec<(Emitted, OwnedEvent)>, Problem> {
    let borrowed: Vec<_> = events.iter().map(|(_, event)| event.borrow()).collect();
    let began = Instant::now();
    let emitting = app
        .emits
        .emitter()
        .emit_all(connection, &borrowed, LockWait::Caller);
    let results = app
        .pool
        .unless_down(emitting)
        .await
        .map_err(|error| refusal(EmitError::Database(error), "/events"))?;
    METRICS.statement(borrowed.len(), began.elapsed());
    let mut emitted = Vec::with_capacity(results.len());
    for ((index, event), result) in events.into_iter().zip(results) {
        match result {
            Ok(one) => emitted.push((one, event)),
            // The tenant is in the path, so it is missing for all events or for none.
            Err(EmitError::UnknownTenant) => return Err(Problem::not_found("tenant")),
            // So is its quota, and a part of the batch is not emitted.
            Err(error @ (EmitError::EmitQuota | EmitError::StorageQuota | EmitError::OtherCell(_))) => {
                return Err(refusal(error, ""));
            }
            Err(EmitError::Database(error)) => return Err(error.into()),
            Err(error) => refused.add(refusal(error, ""), index),
        }
    }
    refused.done().map(|()| emitted)
}

/// The errors of each rejected event, and the problem kinds they had.
#[derive(Default)]
struct Refused {
    /// By event index.
    faults: BTreeMap<usize, Vec<Fault>>,
    kinds: BTreeMap<u16, Kind>,
}

impl Refused {
    fn add(&mut self, problem: Problem, index: usize) {
        let below = format!("/events/{index}");
        self.kinds.insert(problem.status().as_u16(), problem.kind);
        let found = self.faults.entry(index).or_default();
        if problem.errors.is_empty() {
            found.push(Fault {
                pointer: below,
                detail: problem.detail,
            });
            return;
        }
        let faults = problem.errors.into_iter().take(FAULTS_PER_EVENT_MAX);
        found.extend(faults.map(|fault| Fault {
            pointer: format!("{below}{}", fault.pointer),
            detail: fault.detail,
        }));
    }

    /// If all errors share one status, the response keeps it; a mixture is reported as 422.
    fn done(self) -> Result<(), Problem> {
        if self.faults.is_empty() {
            return Ok(());
        }
        let mut problem = Problem::faults(self.faults.into_values().flatten().collect());
        if self.kinds.len() == 1
            && let Some(kind) = self.kinds.into_values().next()
        {
            problem.kind = kind;
        }
        Err(problem)
    }
}
