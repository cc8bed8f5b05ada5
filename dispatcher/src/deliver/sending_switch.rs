//! Whether this process may start attempts, as of the latest settings it has read. Set by `engine.rs`, checked by
//! `attempt.rs` just before a request starts.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Off until the switch in the database was read for the first time.
#[derive(Debug, Clone, Default)]
pub(crate) struct SendingSwitch(Arc<AtomicBool>);

impl SendingSwitch {
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Returns whether this changed it.
    pub(crate) fn set(&self, on: bool) -> bool {
        self.0.swap(on, Ordering::SeqCst) != on
    }
}
