//! What every request goes through, whichever room serves it: input and its errors, problem documents, idempotency,
//! pagination, shares per tenant, timeouts, metrics, and the schemas of single fields.

pub(crate) mod cells;
pub(crate) mod draining;
pub(crate) mod idempotency;
pub(crate) mod idle_timeout;
pub(crate) mod input;
pub(crate) mod input_errors;
pub(crate) mod metrics;
pub(crate) mod page_problem;
pub(crate) mod pagination;
pub(crate) mod problem;
pub(crate) mod read_replica;
pub(crate) mod shares;
pub(crate) mod slots;
pub(crate) mod trace_context;
pub(crate) mod wait_until_applied;
