//! What operators see of a dispatcher: metrics for Prometheus, minute statistics for the dashboard, traces.

pub mod metrics;
pub mod statistics;
pub mod traces;
