//! Emit webhooks inside your own Postgres transaction: the event exists if and only if your change does.
//! Invariant: knows no HTTP and never modifies the bytes of `data`; they are stored as given.
//!
//! ```no_run
//! # async fn pay(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! use postrider_sender::{NewEvent, Emitter};
//!
//! let emitter = Emitter::default(); // one for each database; it keeps compiled schemas
//! let mut transaction = pool.begin().await?;
//! // … your own change …
//! let event = NewEvent::new("acme", "invoice.paid", r#"{"id":"inv_123"}"#).id("inv_123:paid");
//! let emitted = emitter.emit(&mut transaction, &event).await?;
//! transaction.commit().await?;
//! # let _ = emitted; Ok(()) }
//! ```
//!
//! The role needs `usage` on the schema `postrider` and `execute` on `postrider.emit_all` and `postrider.find_schema`.

mod data;
mod emit;
mod message;
mod metered;
mod reference;
mod sample;
mod schema;

pub use data::{BadData, check_data, read_data, read_data_of_body};
pub use emit::{EmitError, Emitted, Emitter, LockWait, NewEvent};
pub use reference::resolve as resolve_reference;
pub use sample::{approximate_sample, sample};
pub use schema::{Effort, Published, Schema, VIOLATIONS_MAX, Verdict, Violation};
