//! The requests and responses of the HTTP API, as the server writes them and a client reads them.
//! Invariant: requests reject unknown fields, responses tolerate them. Doc comments here are the descriptions in
//! `/openapi.json`; notes for programmers are plain comments.

mod cells;
mod deliveries;
mod endpoint_health;
mod endpoints;
mod event_types;
mod events;
mod keys;
mod moves;
mod problem;
mod replays;
mod secrets;
#[cfg(feature = "openapi")]
pub mod shapes;
mod switches;
mod tenants;
mod trials;

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};

pub use cells::{Cell, CellSettings, Cells};
pub use deliveries::{
    Attempt, AttemptTiming, DeadLetterGroup, Delivery, DeliveryWithAttempts, Discarded, NewDiscard,
};
pub use endpoint_health::{AttemptCounts, EndpointHealth, EndpointStatus};
pub use endpoints::{
    AlertSettings, CONCURRENCY, Endpoint, EndpointSettings, RATE_PER_SECOND, TIMEOUT_MS, TlsFingerprints,
    TlsSettings,
};
pub use event_types::{Break, Change, Compatibility, EventType, EventTypeSettings};
pub use events::{BatchForm, EmittedEvent, EmittedEvents, Event, EventForm};
pub use keys::{ApiKey, AuditEntry, NewApiKey};
pub use moves::{Move, NewMove};
pub use problem::{Fault, Problem};
pub use replays::{NewReplay, Replay, ReplayPreview, ReplaySample, ReplaySettings};
pub use secrets::{EndpointSecret, Listener, NewListener, Rotation, SecretValue, Secrets};
pub use switches::{LogFilter, QuotaSettings, Quotas, Sending, SendingSettings, TenantPause};
pub use tenants::{Erasure, NewPortalLink, PortalLink, Tenant, TenantSettings};
pub use trials::{Check, ProbeFinding, ProbeReport, TestAttempt, TestRequest, Verdict};

/// One page of a list.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Page<T> {
    pub data: Vec<T>,
    pub next_cursor: Option<String>,
}

impl<T> Page<T> {
    pub fn map<U>(self, into: impl FnMut(T) -> U) -> Page<U> {
        Page {
            data: self.data.into_iter().map(into).collect(),
            next_cursor: self.next_cursor,
        }
    }
}

/// For `Option<Option<T>>`: an explicit null is `Some(None)`, a missing field is `None`.
pub fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// The same for an object: `serde` would read its fields from an array in order.
fn given_object<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    let given: Option<Object<T>> = Option::deserialize(deserializer)?;
    Ok(Some(given.map(|object| object.0)))
}

struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_map(ObjectVisitor(PhantomData))
            .map(Object)
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}
