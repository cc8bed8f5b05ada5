//! Every statement that moves a delivery between `queue`, `retries`, `attempts`, `archived_attempts` and `dead_letters`: one
//! function for each transition. `docs/state_machine.md` has the diagram; emitting is in `migrations/`.
//!
//! Invariant: a transition is one statement, and the row that it takes away is its guard. Of two that race, one finds
//! no row and does nothing. No other file writes these tables; a test checks it.

mod record;
mod remove;
mod replay;

pub(crate) use record::{AttemptRecord, RecordedRow, record_batch, record_delivered};
pub use record::{FAILING_DAYS, FAILING_PAUSE_DAYS_MAX};
pub use remove::{DiscardBounds, discard_batch, discard_one, remove_forwarded};
pub(crate) use remove::{
    PendingRows, TenantRows, delete_archived_attempts, delete_attempts, drop_endpoint, erase_tenant,
    expire_dead_letters,
};
pub(crate) use replay::{Fence, Moved, ReplayBounds, replay_batch, withdraw};
pub use replay::{hasten_retry, replay_one};
