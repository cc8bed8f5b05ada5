//! One call of `postrider.emit_event`, the SQL function in which every way of emitting ends.
//! Invariant: a refusal leaves nothing behind and does not break the caller's transaction.

use chrono::{DateTime, Utc};
use postrider_proto::{EventId, limits::EVENT_DATA_BYTES_MAX};
use sqlx::{FromRow, PgConnection};

/// An event to be. The forms of its parts are checked by the database.
#[derive(Debug, Clone, Copy)]
pub struct NewEvent<'a> {
    tenant: &'a str,
    type_name: &'a str,
    data: &'a str,
    id: Option<&'a str>,
    version: Option<&'a str>,
    ordering_key: Option<&'a str>,
}

impl<'a> NewEvent<'a> {
    /// `data` is the text of a JSON object and is kept byte for byte.
    pub fn new(tenant: &'a str, type_name: &'a str, data: &'a str) -> Self {
        Self {
            tenant,
            type_name,
            data,
            id: None,
            version: None,
            ordering_key: None,
        }
    }

    /// The producer's own stable id. The same id with the same content again sends nothing.
    pub fn id(mut self, id: impl Into<Option<&'a str>>) -> Self {
        self.id = id.into();
        self
    }

    /// The schema's version; the type's newest when none is given.
    pub fn version(mut self, version: impl Into<Option<&'a str>>) -> Self {
        self.version = version.into();
        self
    }

    /// Events of one tenant and key are numbered 1, 2, 3 … and an ordered endpoint gets them in that order.
    pub fn ordering_key(mut self, key: impl Into<Option<&'a str>>) -> Self {
        self.ordering_key = key.into();
        self
    }

    /// Postgres has no text with a NUL in it and would answer with an error that ends the caller's transaction.
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
                message: "a NUL character is not taken".to_owned(),
            }),
            None => Ok(()),
        }
    }
}

/// What came of an emit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emitted {
    pub event: EventId,
    /// The id the outside sees.
    pub id: String,
    pub created_at: DateTime<Utc>,
    /// The same id with the same content was there before: this is the first event, and nothing is sent again.
    pub duplicate: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum EmitError {
    #[error("there is no such tenant")]
    UnknownTenant,
    #[error("this event id was used before with other content")]
    Conflict,
    #[error("{message}")]
    Invalid { field: String, message: String },
    #[error("the event is too large: at most {EVENT_DATA_BYTES_MAX} bytes of data")]
    TooLarge,
    /// On 40P01 (deadlock) and 40001 (serialization failure) the producer retries its transaction.
    #[error("the database did not answer: {0}")]
    Database(#[from] sqlx::Error),
}

#[derive(FromRow)]
struct Answer {
    event_id: Option<EventId>,
    id: Option<String>,
    created_at: Option<DateTime<Utc>>,
    duplicate: Option<bool>,
    refusal: Option<String>,
    field: Option<String>,
    message: Option<String>,
}

/// Emits on the connection of the caller's transaction. Nothing is sent before that transaction commits.
pub async fn emit(connection: &mut PgConnection, event: &NewEvent<'_>) -> Result<Emitted, EmitError> {
    if event.data.len() > EVENT_DATA_BYTES_MAX {
        return Err(EmitError::TooLarge);
    }
    event.check_no_nul()?;
    let answer: Answer = sqlx::query_as("select * from postrider.emit_event($1, $2, $3, $4, $5, $6)")
        .bind(event.tenant)
        .bind(event.type_name)
        .bind(event.data)
        .bind(event.id)
        .bind(event.version)
        .bind(event.ordering_key)
        .fetch_one(connection)
        .await?;
    answer.read()
}

impl Answer {
    fn read(self) -> Result<Emitted, EmitError> {
        match self.refusal.as_deref() {
            None => {}
            Some("PR404") => return Err(EmitError::UnknownTenant),
            Some("PR409") => return Err(EmitError::Conflict),
            Some(_) => {
                return Err(EmitError::Invalid {
                    field: self.field.unwrap_or_default(),
                    message: self.message.unwrap_or_default(),
                });
            }
        }
        match (self.event_id, self.id, self.created_at) {
            (Some(event), Some(id), Some(created_at)) => Ok(Emitted {
                event,
                id,
                created_at,
                duplicate: self.duplicate.unwrap_or(false),
            }),
            _ => Err(EmitError::Database(sqlx::Error::RowNotFound)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(refusal: &str) -> Answer {
        Answer {
            event_id: None,
            id: None,
            created_at: None,
            duplicate: Some(false),
            refusal: Some(refusal.to_owned()),
            field: Some("data".to_owned()),
            message: Some("words".to_owned()),
        }
    }

    #[test]
    fn refusals_become_their_own_errors() {
        assert!(matches!(refused("PR404").read(), Err(EmitError::UnknownTenant)));
        assert!(matches!(refused("PR409").read(), Err(EmitError::Conflict)));
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
