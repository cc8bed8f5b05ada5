//! The relays: they move committed events from an outbox in another database into this one. A producer's own database has one
//! (`source.rs`), and the home database has one for tenants that live in cells (`home.rs`).
//! Invariant: an event is emitted here before it is removed there, and its id was fixed there. After a crash between
//! the two it is emitted again with the same id and content, which has no effect: exactly once, whichever side dies.

mod aside;
mod batch;
pub(crate) mod home;
mod outbox;
pub(crate) mod source;

pub use source::migrate_outbox;
