//! The database as the dispatcher uses it: its schema, and every statement that moves a delivery.

pub(crate) mod restored;
pub mod schema;
pub mod sending;
pub mod transitions;
