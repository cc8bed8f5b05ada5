//! Wakes the reader after an emit was committed in this process, so that it need not wait for its next poll.

use std::sync::Arc;

use tokio::sync::Notify;

#[derive(Debug, Clone, Default)]
pub struct Wake(Arc<Notify>);

impl Wake {
    /// Something was committed. Calls made while the reader is busy are merged into one.
    pub fn now(&self) {
        self.0.notify_one();
    }

    pub(crate) async fn wait(&self) {
        self.0.notified().await;
    }
}
