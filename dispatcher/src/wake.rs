//! A nudge from whoever just committed an emit in this process, so that the reader need not wait for its next poll.

use std::sync::Arc;

use tokio::sync::Notify;

#[derive(Debug, Clone, Default)]
pub struct Wake(Arc<Notify>);

impl Wake {
    /// Something was committed. Nudges that come while the reader is busy count as one.
    pub fn now(&self) {
        self.0.notify_one();
    }

    pub(crate) async fn wait(&self) {
        self.0.notified().await;
    }
}
