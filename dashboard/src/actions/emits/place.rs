//! Where the events of a tenant are stored: in its cell, or at home if the cell can't take them now.
//! Invariant: an event is stored in a second place only after the first has refused it. No event overtakes an earlier one of
//! its ordering key.

use postrider_sender::Emitted;

use super::OwnedEvent;
use crate::{
    Shared,
    http::{
        cells::Here,
        idempotency::Claim,
        problem::{Kind, Problem},
    },
};

/// Returns the event with the app that has stored it.
pub(crate) async fn emit(here: &Here, event: OwnedEvent) -> Result<(Emitted, &Shared), Problem> {
    let keys: Vec<&str> = event.ordering_key.as_deref().into_iter().collect();
    let app = here.emitting(&event.tenant, &keys).await?;
    if !here.is_away() {
        return Ok((app.emits.emit(event).await?, app));
    }
    match app.emits.emit(event.clone()).await {
        Err(problem) if has_left(here, &event.tenant, &problem) => {
            Ok((here.home.emits.emit(event).await?, &here.home))
        }
        emitted => Ok((emitted?, app)),
    }
}

/// With an id that a repeated request gives it, too, if the tenant lives elsewhere and the request has a key.
pub(crate) fn with_id(here: &Here, claim: &Claim, number: usize, event: OwnedEvent) -> OwnedEvent {
    match event.id {
        None if here.is_elsewhere() => OwnedEvent {
            id: claim.event_id(number),
            ..event
        },
        _ => event,
    }
}

/// Whether the cell has refused an event because the tenant is not in it any more.
pub(crate) fn has_left(here: &Here, tenant: &str, problem: &Problem) -> bool {
    // Another one with its id may have been created elsewhere.
    let has_left = here.is_away() && matches!(problem.kind, Kind::OtherCell | Kind::NotFound);
    if has_left {
        here.forget(tenant);
    }
    has_left
}
