//! A delivery as the API and exports show it.

use postrider_proto::api;

use crate::tables::deliveries::Delivery;

impl From<&Delivery> for api::Delivery {
    fn from(delivery: &Delivery) -> Self {
        Self {
            id: delivery.id().to_string(),
            event: delivery.event(),
            r#type: delivery.event_type.clone(),
            endpoint: delivery.endpoint.clone(),
            state: delivery.state(),
            reason: delivery.reason,
            attempt_count: delivery.attempt_count,
            status_code: delivery.status,
            error: delivery.error.clone(),
            created_at: delivery.created_at(),
            last_attempt_at: delivery.last_attempt_at,
            next_attempt_at: delivery.due_at,
        }
    }
}
