//! The shared vocabulary of Postrider: ids, states, outcomes, limits, signatures.
//! Invariant: no I/O and no clock. Results depend on arguments alone.
//!
//! Receivers need only [`signature`]: [`signature::verify`] and its two siblings.

#[cfg(feature = "api")]
pub mod api;
pub mod filter;
pub mod ids;
pub mod json;
pub mod limits;
pub mod outcome;
pub mod routing;
pub mod signature;
pub mod state;
pub mod timing;
pub mod trace;

pub use ids::{DeliveryId, EndpointId, Epoch, EventId, ReplayId, Shard, TenantId, TypeId};
pub use outcome::{Failure, Outcome, OutcomeKind, Response};
pub use state::{
    DeadReason, DeliveryState, EndpointState, FinalState, PersonRole, ReplayKind, ReplaySource, ReplayState,
};
pub use timing::Timing;
