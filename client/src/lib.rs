//! A typed client of Postrider's HTTP API.
//! Invariant: an error response is a value, the server's own [`Problem`] (RFC 9457), and no response is read without
//! a limit.
//!
//! ```no_run
//! # async fn pay() -> Result<(), postrider_client::Error> {
//! use postrider_client::{Client, Error, NewEvent};
//!
//! let client = Client::new("http://127.0.0.1:8080", "prk_…")?;
//! let event = NewEvent::new("invoice.paid", r#"{"id":"inv_123"}"#).id("inv_123:paid");
//! match client.emit("acme", &event).await {
//!     Ok(emitted) => println!("{} was emitted", emitted.id),
//!     Err(Error::Refused(problem)) if problem.status == 409 => println!("{}", problem.detail),
//!     Err(error) => return Err(error),
//! }
//! # Ok(()) }
//! ```

mod calls;
mod error;
mod listening;
mod models;
mod transport;

pub use error::Error;
pub use listening::{Handover, Stream};
pub use models::{DeliveryFilter, HealthFilter, NewEvent};
pub use postrider_proto::api::*;
pub use transport::Client;

/// Which page of a list to return.
#[derive(Debug, Clone, Default)]
pub struct PageOf {
    /// At most 1,000; the server's default if none.
    pub limit: Option<u32>,
    /// The `next_cursor` of the previous page.
    pub cursor: Option<String>,
}

impl PageOf {
    pub fn limit(limit: u32) -> Self {
        Self {
            limit: Some(limit),
            cursor: None,
        }
    }
}
