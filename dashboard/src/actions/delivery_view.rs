//! A delivery as the API and exports show it.

use chrono::{DateTime, Utc};
use postrider_proto::{DeadReason, DeliveryState};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{http::shapes, tables::deliveries::Delivery};

#[derive(Serialize, ToSchema)]
#[schema(as = Delivery)]
pub(crate) struct DeliveryView {
    id: String,
    event: String,
    r#type: String,
    endpoint: String,
    #[schema(schema_with = shapes::delivery_state)]
    state: DeliveryState,
    /// Why the delivery is dead.
    #[schema(schema_with = shapes::dead_reason_or_null)]
    reason: Option<DeadReason>,
    attempt_count: i16,
    /// HTTP status of the last response.
    #[schema(schema_with = shapes::status_or_null)]
    status_code: Option<i16>,
    error: Option<String>,
    created_at: Option<DateTime<Utc>>,
    last_attempt_at: Option<DateTime<Utc>>,
    /// Null while pending means as soon as the endpoint has capacity.
    next_attempt_at: Option<DateTime<Utc>>,
}

impl From<&Delivery> for DeliveryView {
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

impl DeliveryView {
    pub(crate) const CSV_COLUMNS: [&str; 12] = [
        "id",
        "event",
        "type",
        "endpoint",
        "state",
        "reason",
        "attempt_count",
        "status_code",
        "error",
        "created_at",
        "last_attempt_at",
        "next_attempt_at",
    ];

    pub(crate) fn csv_cells(&self) -> [String; 12] {
        let time = |time: Option<DateTime<Utc>>| time.map(|time| time.to_rfc3339()).unwrap_or_default();
        [
            self.id.clone(),
            self.event.clone(),
            self.r#type.clone(),
            self.endpoint.clone(),
            self.state.as_str().to_owned(),
            self.reason.map(|reason| reason.to_string()).unwrap_or_default(),
            self.attempt_count.to_string(),
            self.status_code.map(|code| code.to_string()).unwrap_or_default(),
            self.error.clone().unwrap_or_default(),
            time(self.created_at),
            time(self.last_attempt_at),
            time(self.next_attempt_at),
        ]
    }
}
