//! The hot path, in the order a delivery takes it: `reader` sees its queue row, `engine` puts it into the `lane` of its
//! endpoint and picks it when `capacity` allows, `attempt` reads the body, signs and sends it, `retry` decides what
//! follows, and `recorder` writes the result.
//!
//! Invariant: one task (`engine`) owns every lane, and it awaits nothing but messages.

pub(crate) mod attempt;
pub(crate) mod bodies;
pub(crate) mod breaker;
pub(crate) mod capacity;
pub(crate) mod change_watcher;
pub(crate) mod division;
pub(crate) mod draining;
pub(crate) mod endpoint;
pub(crate) mod engine;
pub(crate) mod fair_queue;
#[cfg(test)]
pub(crate) mod fleet_simulation;
pub(crate) mod lane;
#[cfg(test)]
pub(crate) mod lane_simulation;
pub(crate) mod queued_delivery;
pub(crate) mod rate;
pub(crate) mod reader;
#[cfg(test)]
pub(crate) mod reader_simulation;
pub(crate) mod recorder;
pub mod retry;
pub(crate) mod round_robin;
pub(crate) mod sending_switch;
pub(crate) mod snapshot;
pub(crate) mod survey;
pub(crate) mod worker_pool;
