//! Emit webhooks inside your own Postgres transaction: the event exists if and only if your change does.
//! Invariant: knows no HTTP and never touches the bytes of `data`; what is stored is what was given.
//!
//! ```no_run
//! # async fn pay(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! use postrider_sender::{NewEvent, emit};
//!
//! let mut transaction = pool.begin().await?;
//! // … your own change …
//! let event = NewEvent::new("acme", "invoice.paid", r#"{"id":"inv_123"}"#).id("inv_123:paid");
//! let emitted = emit(&mut transaction, &event).await?;
//! transaction.commit().await?;
//! # let _ = emitted; Ok(()) }
//! ```

mod data;
mod emit;

pub use data::{BadData, check_data};
pub use emit::{EmitError, Emitted, NewEvent, emit};
