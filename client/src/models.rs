//! Request and response types, as `/openapi.json` describes them. Unknown fields are ignored.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use postrider_proto::{
    DeliveryState, EndpointState,
    state::{KeyRole, SignatureFormat},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

/// One page of a list.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Page<T> {
    pub data: Vec<T>,
    pub next_cursor: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tenant {
    pub id: String,
    pub name: Option<String>,
    pub rotate_every_days: Option<i16>,
    pub created_at: DateTime<Utc>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EventType {
    #[serde(rename = "type")]
    pub name: String,
    pub description: Option<String>,
    #[serde(default)]
    pub thin: bool,
    /// In version order: the last is the newest.
    pub versions: Vec<String>,
    /// The original text. Not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schemas: Option<BTreeMap<String, Box<RawValue>>>,
    pub created_at: DateTime<Utc>,
    /// On an update that added versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub compatibility: Vec<Compatibility>,
}

/// What a version breaks for consumers of the previous one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Compatibility {
    pub version: String,
    pub previous_version: String,
    pub breaking_changes: Vec<Break>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Break {
    pub pointer: String,
    pub change: String,
    pub detail: String,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct EventTypeSettings {
    pub description: Option<String>,
    pub thin: bool,
    pub schemas: BTreeMap<String, Box<RawValue>>,
}

/// An event to emit. `data` is the text of a JSON object and is sent unchanged.
#[derive(Debug, Clone)]
pub struct NewEvent {
    type_name: String,
    data: String,
    id: Option<String>,
    version: Option<String>,
    ordering_key: Option<String>,
}

impl NewEvent {
    pub fn new(type_name: impl Into<String>, data: impl Into<String>) -> Self {
        Self {
            type_name: type_name.into(),
            data: data.into(),
            id: None,
            version: None,
            ordering_key: None,
        }
    }

    /// Your own stable id: an event with the same id is sent once.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.version = Some(version.into());
        self
    }

    pub fn ordering_key(mut self, key: impl Into<String>) -> Self {
        self.ordering_key = Some(key.into());
        self
    }

    /// The request body; fails if the data is not JSON.
    pub(crate) fn wire(&self) -> Result<EventOnTheWire<'_>, serde_json::Error> {
        Ok(EventOnTheWire {
            r#type: &self.type_name,
            data: serde_json::from_str(&self.data)?,
            id: self.id.as_deref(),
            version: self.version.as_deref(),
            ordering_key: self.ordering_key.as_deref(),
        })
    }
}

#[derive(Serialize)]
pub(crate) struct EventOnTheWire<'a> {
    r#type: &'a str,
    data: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<&'a str>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    pub id: String,
    #[serde(rename = "type")]
    pub type_name: String,
    pub version: String,
    pub created_at: DateTime<Utc>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordering_key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<i64>,
    /// The original text, byte for byte.
    pub data: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deliveries: Option<Vec<Delivery>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Endpoint {
    pub id: String,
    pub url: String,
    pub description: Option<String>,
    pub types: Vec<String>,
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
    pub filter: Option<Value>,
    pub concurrency: Option<i16>,
    pub rate_per_second: Option<i32>,
    pub ordered: bool,
    pub retry_schedule: Option<Vec<String>>,
    pub timeout_ms: Option<i32>,
    pub signature: SignatureFormat,
    pub rotate_every_days: Option<i16>,
    /// Header names; the values are masked.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    pub enabled: bool,
    pub state: EndpointState,
    pub state_reason: Option<String>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_key: Option<String>,
    /// Returned only on creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

/// Omitted fields get the platform default, or are left unchanged on update.
#[derive(Debug, Clone, Default, Serialize)]
pub struct EndpointSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub types: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub versions: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_per_second: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ordered: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_schedule: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signature: Option<SignatureFormat>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotate_every_days: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, String>>,
    /// Only on creation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Only on update: false pauses the endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Secrets {
    /// Active secrets, newest first.
    pub data: Vec<EndpointSecret>,
}

#[derive(Clone, Serialize, Deserialize)]
pub struct EndpointSecret {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_key: Option<String>,
    /// `current` or `retiring`.
    pub state: String,
    pub created_at: DateTime<Utc>,
    pub retires_at: Option<DateTime<Utc>>,
}

impl std::fmt::Debug for EndpointSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EndpointSecret({})", self.state)
    }
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct Rotation {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap_seconds: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Delivery {
    pub id: String,
    pub event: String,
    #[serde(rename = "type")]
    pub type_name: String,
    pub endpoint: String,
    pub state: DeliveryState,
    /// Why the delivery is dead.
    pub reason: Option<String>,
    pub attempt_count: i16,
    pub status_code: Option<i16>,
    pub error: Option<String>,
    pub created_at: Option<DateTime<Utc>>,
    pub last_attempt_at: Option<DateTime<Utc>>,
    pub next_attempt_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeliveryWithAttempts {
    #[serde(flatten)]
    pub delivery: Delivery,
    pub url: String,
    /// Newest first.
    pub attempts: Vec<Attempt>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Attempt {
    pub number: i16,
    pub started_at: DateTime<Utc>,
    pub duration_ms: i32,
    pub outcome: String,
    pub status: Option<i16>,
    pub error: Option<String>,
    pub request_headers: BTreeMap<String, String>,
    pub response_head: Option<String>,
    pub response_body: Option<String>,
    pub replay: Option<String>,
}

/// Filter of a list of deliveries.
#[derive(Debug, Clone, Default)]
pub struct DeliveryFilter {
    pub state: Option<DeliveryState>,
    pub endpoint: Option<String>,
    pub type_name: Option<String>,
    pub event: Option<String>,
    pub status_code: Option<u16>,
    pub since: Option<DateTime<Utc>>,
    pub until: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct NewReplay {
    /// `deliveries`, or `missing`: events that the endpoint missed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<bool>,
}

/// A bulk replay, or the result of a dry run, which has no id.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Replay {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    pub total: i64,
    #[serde(default)]
    pub done: i64,
    #[serde(flatten)]
    pub more: BTreeMap<String, Value>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TestAttempt {
    #[serde(flatten)]
    pub attempt: Attempt,
    pub event: String,
    #[serde(rename = "type")]
    pub type_name: String,
    pub version: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProbeReport {
    pub endpoint: String,
    pub url: String,
    #[serde(rename = "type")]
    pub type_name: String,
    /// Out of 100.
    pub score: u32,
    pub passed: bool,
    pub requests: u32,
    pub duration_ms: u64,
    pub checks: Vec<ProbeFinding>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProbeFinding {
    pub check: String,
    /// `pass`, `warning`, `fail` or `skipped`.
    pub verdict: String,
    pub title: String,
    pub found: String,
    pub meaning: String,
    pub fix: String,
}

/// A temporary endpoint whose events this machine receives.
#[derive(Clone, Serialize, Deserialize)]
pub struct Listener {
    pub id: String,
    pub types: Vec<String>,
    pub signature: SignatureFormat,
    /// What a receiver verifies with: a secret, or a public key.
    pub secret: String,
    pub expires_at: DateTime<Utc>,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Listener({})", self.id)
    }
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct NewListener {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub types: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signature: Option<SignatureFormat>,
    /// Your own secret, so that the receiver keeps its configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct NewApiKey {
    pub role: KeyRole,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub name: String,
}

#[derive(Clone, Serialize, Deserialize)]
pub struct ApiKey {
    pub id: String,
    pub role: KeyRole,
    pub tenant: Option<String>,
    pub name: String,
    pub created_at: DateTime<Utc>,
    pub revoked_at: Option<DateTime<Utc>>,
    /// Returned only on creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AuditEntry {
    pub at: DateTime<Utc>,
    pub actor: String,
    pub action: String,
    pub tenant: Option<String>,
    pub subject: String,
    pub detail: Option<Value>,
}
