//! Calls `postrider.emit_all`: each event is validated against its schema and emitted with that exact schema.
//! Invariant: a rejected event has no effect and does not abort the caller's transaction.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use postrider_proto::{
    EventId,
    limits::EVENT_DATA_BYTES_MAX,
    trace::{TraceContext, TraceState},
};
use sqlx::{FromRow, PgConnection};

use crate::{
    data::check_data,
    schema::{Published, Schemas, Violation},
};

/// How often a type is looked up again if its newest version changes concurrently.
const ROUNDS_MAX: usize = 4;
/// With `LockWait::Short`.
const LOCK_TIMEOUT_SHORT_MS: i32 = 100;

/// An event to emit. The database checks the form of its fields.
#[derive(Debug, Clone, Copy)]
pub struct NewEvent<'a> {
    tenant: &'a str,
    type_name: &'a str,
    data: &'a str,
    id: Option<&'a str>,
    version: Option<&'a str>,
    ordering_key: Option<&'a str>,
    trace: Option<TraceContext>,
    trace_state: Option<&'a TraceState>,
    checked: Option<i32>,
}

impl<'a> NewEvent<'a> {
    /// `data` is the text of a JSON object and is stored byte for byte.
    pub fn new(tenant: &'a str, type_name: &'a str, data: &'a str) -> Self {
        Self {
            tenant,
            type_name,
            data,
            id: None,
            version: None,
            ordering_key: None,
            trace: None,
            trace_state: None,
            checked: None,
        }
    }

    /// The producer's own stable id. The same id with the same content again sends nothing.
    pub fn id(mut self, id: impl Into<Option<&'a str>>) -> Self {
        self.id = id.into();
        self
    }

    /// The schema version; the type's newest if none is given.
    pub fn version(mut self, version: impl Into<Option<&'a str>>) -> Self {
        self.version = version.into();
        self
    }

    /// Events with the same tenant and key are numbered 1, 2, 3 …, and an ordered endpoint receives them in that
    /// order.
    pub fn ordering_key(mut self, key: impl Into<Option<&'a str>>) -> Self {
        self.ordering_key = key.into();
        self
    }

    /// The caller's trace context: if tracing is on, the attempts become part of its trace.
    pub fn trace(mut self, context: impl Into<Option<TraceContext>>) -> Self {
        self.trace = context.into();
        self
    }

    /// The `tracestate` of the trace. Ignored without a trace.
    pub fn trace_state(mut self, state: impl Into<Option<&'a TraceState>>) -> Self {
        self.trace_state = state.into();
        self
    }

    /// The schema (`Published::id`) that the data was already validated against. It is not validated against that one
    /// again.
    pub fn checked(mut self, schema: impl Into<Option<i32>>) -> Self {
        self.checked = schema.into();
        self
    }

    /// Postgres text can't contain NUL, and the error would abort the caller's transaction.
    fn check_no_nul(&self) -> Result<(), EmitError> {
        if self.tenant.contains('\0') {
            return Err(EmitError::UnknownTenant);
        }
        let parts = [
            ("type", Some(self.type_name)),
            ("data", Some(self.data)),
            ("id", self.id),
            ("version", self.version),
            ("ordering_key", self.ordering_key),
        ];
        match parts
            .into_iter()
            .find(|(_, text)| text.is_some_and(|t| t.contains('\0')))
        {
            Some((field, _)) => Err(EmitError::Invalid {
                field: field.to_owned(),
                message: "must not contain a NUL character".to_owned(),
            }),
            None => Ok(()),
        }
    }
}

/// The result of an emit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emitted {
    pub event: EventId,
    /// The public id.
    pub id: String,
    pub created_at: DateTime<Utc>,
    /// The schema version of the event.
    pub version: String,
    /// Only for a new event with an ordering key.
    pub sequence: Option<i64>,
    /// An event with this id and the same content already existed: this is the first event, and nothing is sent
    /// again.
    pub duplicate: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum EmitError {
    #[error("tenant does not exist")]
    UnknownTenant,
    #[error("an event with this id but different content already exists")]
    Conflict,
    #[error("{message}")]
    Invalid { field: String, message: String },
    /// The tenant has used its quota of emits for this minute (`PR429`).
    #[error("the tenant has used its quota of emits for this minute")]
    EmitQuota,
    /// The tenant has used its quota of stored bytes (`PR507`).
    #[error("the tenant has used its quota of stored bytes")]
    StorageQuota,
    /// In the database of a cell: the tenant lives in another one, or is moving there (`PR421`).
    #[error("{0}")]
    OtherCell(String),
    #[error("data does not match the event type's schema: {}", list_violations(.0))]
    Schema(Vec<Violation>),
    /// Only with `LockWait::Short`: the type's newest version has changed since it was last looked up.
    #[error("the event type's newest version just changed: try again")]
    Stale,
    #[error("the event is too large: the limit is {} KiB of data", EVENT_DATA_BYTES_MAX / 1024)]
    TooLarge,
    /// On 40P01 (deadlock) and 40001 (serialization failure) the producer should retry its transaction.
    #[error("database error: {0}")]
    Database(#[from] sqlx::Error),
}

fn list_violations(violations: &[Violation]) -> String {
    let listed: Vec<String> = violations
        .iter()
        .map(|one| format!("{} {}", one.pointer, one.message))
        .collect();
    listed.join("; ")
}

/// How long an emit may wait for another transaction with the same id or ordering key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockWait {
    /// As long as the caller's own transaction allows.
    Caller,
    /// Briefly, and a single try. For events of several callers in one statement, which is a transaction of its own.
    Short,
}

#[derive(Debug, FromRow)]
struct EmitRow {
    position: i32,
    event_id: Option<EventId>,
    id: Option<String>,
    created_at: Option<DateTime<Utc>>,
    duplicate: Option<bool>,
    refusal: Option<String>,
    field: Option<String>,
    message: Option<String>,
    version: Option<String>,
    sequence: Option<i64>,
}

/// Emits on connections of one database. Clones share cached schemas.
#[derive(Debug, Clone, Default)]
pub struct Emitter {
    schemas: Arc<Schemas>,
}

impl Emitter {
    /// Emits on the connection of the caller's transaction. Nothing is sent before that transaction commits.
    pub async fn emit(
        &self,
        connection: &mut PgConnection,
        event: &NewEvent<'_>,
    ) -> Result<Emitted, EmitError> {
        let mut done = self
            .emit_all(connection, std::slice::from_ref(event), LockWait::Caller)
            .await?;
        done.pop()
            .unwrap_or(Err(EmitError::Database(sqlx::Error::RowNotFound)))
    }

    /// Emits up to 1,000 events and returns a result for each. Rejected events do not affect the others: roll back to
    /// get all or none.
    pub async fn emit_all(
        &self,
        connection: &mut PgConnection,
        events: &[NewEvent<'_>],
        lock_wait: LockWait,
    ) -> Result<Vec<Result<Emitted, EmitError>>, sqlx::Error> {
        let mut results: Vec<Option<Result<Emitted, EmitError>>> = Vec::new();
        results.resize_with(events.len(), || None);
        let mut open: Vec<usize> = (0..events.len()).collect();
        let rounds = match lock_wait {
            LockWait::Caller => ROUNDS_MAX,
            LockWait::Short => 1,
        };
        for round in 0..rounds {
            let mut checked = Vec::with_capacity(open.len());
            for index in open {
                match self.check(connection, &events[index], round > 0).await? {
                    Ok(schema) => checked.push((index, schema)),
                    Err(refused) => results[index] = Some(Err(refused)),
                }
            }
            if checked.is_empty() {
                break;
            }
            open = Vec::new();
            for row in call(connection, events, &checked, lock_wait).await? {
                let Some((index, _)) = usize::try_from(row.position).ok().and_then(|at| checked.get(at))
                else {
                    continue;
                };
                if row.refusal.as_deref() == Some("PR000") && round + 1 < rounds {
                    open.push(*index);
                } else {
                    results[*index] = Some(row.read());
                }
            }
            if open.is_empty() {
                break;
            }
        }
        let missing = || Err(EmitError::Database(sqlx::Error::RowNotFound));
        Ok(results
            .into_iter()
            .map(|result| result.unwrap_or_else(missing))
            .collect())
    }

    /// The cached schema of this type and version, if any. A newer version may exist by now.
    pub fn known_schema(&self, type_name: &str, version: Option<&str>) -> Option<Arc<Published>> {
        self.schemas.known(type_name, version)
    }

    /// The same, from the database. None: there is no such type or version.
    pub async fn find_schema(
        &self,
        connection: &mut PgConnection,
        type_name: &str,
        version: Option<&str>,
    ) -> Result<Option<Arc<Published>>, sqlx::Error> {
        // Postgres text can't contain NUL: no type has such a name.
        if type_name.contains('\0') || version.is_some_and(|version| version.contains('\0')) {
            return Ok(None);
        }
        self.schemas.find(connection, type_name, version, false).await
    }

    /// The id of the schema that the data matches; 0 if there is none, which the database will report.
    async fn check(
        &self,
        connection: &mut PgConnection,
        event: &NewEvent<'_>,
        refresh: bool,
    ) -> Result<Result<i32, EmitError>, sqlx::Error> {
        if event.data.len() > EVENT_DATA_BYTES_MAX {
            return Ok(Err(EmitError::TooLarge));
        }
        if let Err(refused) = event.check_no_nul() {
            return Ok(Err(refused));
        }
        let schema = self
            .schemas
            .find(connection, event.type_name, event.version, refresh)
            .await?;
        let Some(schema) = schema else { return Ok(Ok(0)) };
        if event.checked == Some(schema.id()) {
            return Ok(Ok(schema.id()));
        }
        // Data that is not a JSON object is rejected with its own message.
        if let Err(bad) = check_data(event.data) {
            return Ok(Err(EmitError::Invalid {
                field: "data".to_owned(),
                message: bad.to_string(),
            }));
        }
        let violations = schema.violations(event.data);
        Ok(if violations.is_empty() {
            Ok(schema.id())
        } else {
            Err(EmitError::Schema(violations))
        })
    }
}

async fn call<'a>(
    connection: &mut PgConnection,
    events: &[NewEvent<'a>],
    checked: &[(usize, i32)],
    lock_wait: LockWait,
) -> Result<Vec<EmitRow>, sqlx::Error> {
    let of = |part: fn(&NewEvent<'a>) -> Option<&'a str>| -> Vec<Option<&'a str>> {
        checked.iter().map(|(index, _)| part(&events[*index])).collect()
    };
    let traces: Vec<Option<Vec<u8>>> = checked
        .iter()
        .map(|(index, _)| {
            let event = &events[*index];
            event.trace.map(|trace| trace.to_bytes(event.trace_state))
        })
        .collect();
    let contexts = traces.iter().any(Option::is_some).then_some(traces);
    let lock_timeout_ms = match lock_wait {
        LockWait::Caller => None,
        LockWait::Short => Some(LOCK_TIMEOUT_SHORT_MS),
    };
    sqlx::query_as("select * from postrider.emit_all($1, $2, $3, $4, $5, $6, $7, $8, $9)")
        .bind(of(|event| Some(event.tenant)))
        .bind(of(|event| Some(event.type_name)))
        .bind(of(|event| Some(event.data)))
        .bind(of(|event| event.id))
        .bind(of(|event| event.version))
        .bind(of(|event| event.ordering_key))
        .bind(checked.iter().map(|(_, schema)| *schema).collect::<Vec<i32>>())
        .bind(contexts)
        .bind(lock_timeout_ms)
        .fetch_all(connection)
        .await
}

impl EmitRow {
    fn read(self) -> Result<Emitted, EmitError> {
        match self.refusal.as_deref() {
            None => {}
            Some("PR404") => return Err(EmitError::UnknownTenant),
            Some("PR409") => return Err(EmitError::Conflict),
            Some("PR000") => return Err(EmitError::Stale),
            Some("PR429") => return Err(EmitError::EmitQuota),
            Some("PR507") => return Err(EmitError::StorageQuota),
            Some("PR421") => return Err(EmitError::OtherCell(self.message.unwrap_or_default())),
            Some(_) => {
                return Err(EmitError::Invalid {
                    field: self.field.unwrap_or_default(),
                    message: self.message.unwrap_or_default(),
                });
            }
        }
        match (self.event_id, self.id, self.created_at, self.version) {
            (Some(event), Some(id), Some(created_at), Some(version)) => Ok(Emitted {
                event,
                id,
                created_at,
                version,
                sequence: self.sequence,
                duplicate: self.duplicate.unwrap_or(false),
            }),
            _ => Err(EmitError::Database(sqlx::Error::RowNotFound)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(refusal: &str) -> EmitRow {
        EmitRow {
            position: 0,
            event_id: None,
            id: None,
            created_at: None,
            duplicate: Some(false),
            refusal: Some(refusal.to_owned()),
            field: Some("data".to_owned()),
            message: Some("words".to_owned()),
            version: None,
            sequence: None,
        }
    }

    #[test]
    fn refusals_become_their_own_errors() {
        assert!(matches!(refused("PR404").read(), Err(EmitError::UnknownTenant)));
        assert!(matches!(refused("PR409").read(), Err(EmitError::Conflict)));
        assert!(matches!(refused("PR429").read(), Err(EmitError::EmitQuota)));
        assert!(matches!(refused("PR507").read(), Err(EmitError::StorageQuota)));
        assert!(matches!(refused("PR421").read(), Err(EmitError::OtherCell(message)) if message == "words"));
        let Err(EmitError::Invalid { field, message }) = refused("PR422").read() else {
            panic!("PR422 is a refusal of a part");
        };
        assert_eq!((field.as_str(), message.as_str()), ("data", "words"));
    }

    #[test]
    fn a_nul_is_refused_before_the_database_sees_it() {
        let event = NewEvent::new("acme", "a.b", "{}");
        assert!(event.check_no_nul().is_ok());
        assert!(matches!(
            event.ordering_key("a\0").check_no_nul(),
            Err(EmitError::Invalid { field, .. }) if field == "ordering_key"
        ));
        assert!(matches!(
            NewEvent::new("\0", "a.b", "{}").check_no_nul(),
            Err(EmitError::UnknownTenant)
        ));
    }
}
