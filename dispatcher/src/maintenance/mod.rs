//! Background work off the hot path: scheduled duties and requested jobs (apalis), bulk replays, the relay from other
//! databases. None of it may delay a delivery.

pub(crate) mod deleted_endpoints;
pub(crate) mod disable;
pub mod erasure;
pub(crate) mod jobs;
pub mod moves;
pub mod notices;
pub mod partitions;
pub mod planned_rotation;
pub mod relay;
pub mod replays;
pub mod retention;
pub mod rollup;
pub mod usage;
pub(crate) mod vacuum;
