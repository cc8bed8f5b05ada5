//! A delivery in memory: only ids, never its body, because there are many.

use postrider_proto::{EventId, TenantId, TypeId};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QueuedDelivery {
    pub(crate) event: EventId,
    pub(crate) tenant: TenantId,
    pub(crate) type_id: TypeId,
    /// The number of the latest attempt made; the next one is one more.
    pub(crate) attempt: u16,
    /// Position in the schedule of the next attempt.
    pub(crate) step: u16,
    /// The ordering key's number. Replays have none: they are outside the order.
    pub(crate) key: Option<i64>,
    pub(crate) replay: Option<Box<str>>,
}

impl QueuedDelivery {
    pub(crate) fn number(&self) -> u16 {
        self.attempt.saturating_add(1)
    }
}
