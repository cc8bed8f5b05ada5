//! The rules of an emit that the HTTP API and gRPC share: what is checked before the database, and how a rejected event
//! is reported.

use std::time::Duration;

use chrono::Utc;
use postrider_proto::limits::EVENT_DATA_BYTES_MAX;
use postrider_sender::{EmitError, check_data};

use super::OwnedEvent;
use crate::http::{
    metrics::{Key, METRICS, Repeated},
    problem::{Fault, Kind, Problem, sentence},
};

/// Stored bytes become free once an hour.
const STORAGE_RETRY: Duration = Duration::from_secs(3_600);

/// Emits are counted by the minute of the database's clock, which is close to this one.
#[expect(
    clippy::disallowed_methods,
    reason = "a hint for clients, which nothing relies on"
)]
fn until_next_minute() -> Duration {
    const MINUTE: i64 = 60;
    let into_minute = Utc::now().timestamp().rem_euclid(MINUTE);
    Duration::from_secs((MINUTE - into_minute).unsigned_abs())
}

/// Every check that needs no database.
pub(crate) fn checked(event: OwnedEvent) -> Result<OwnedEvent, Problem> {
    if event.data.len() > EVENT_DATA_BYTES_MAX {
        return Err(refusal(EmitError::TooLarge, ""));
    }
    match check_data(&event.data) {
        Ok(()) => Ok(event),
        Err(bad @ postrider_sender::BadData::NotAnObject) => Err(Problem::invalid("/data", bad.to_string())),
        Err(bad) => Err(Problem::bad_request(sentence(&bad))),
    }
}

/// `below` is the JSON pointer of the event in the body.
pub(crate) fn refusal(error: EmitError, below: &str) -> Problem {
    match error {
        EmitError::UnknownTenant => Problem::not_found("tenant"),
        EmitError::Conflict => {
            METRICS.repeated(Key::EventId, Repeated::Conflict);
            Problem::new(Kind::EventIdConflict, sentence(&error))
        }
        EmitError::Invalid { field, message } => Problem::invalid(format!("{below}/{field}"), message),
        EmitError::Schema(violations) => Problem::faults(
            violations
                .into_iter()
                .map(|violation| Fault {
                    pointer: format!("{below}/data{}", violation.pointer),
                    detail: violation.message,
                })
                .collect(),
        ),
        EmitError::EmitQuota => Problem::over_quota(
            Kind::EmitQuota,
            "The tenant has used its quota of emits for this minute. Try again in the next minute.",
            until_next_minute(),
        ),
        EmitError::StorageQuota => Problem::over_quota(
            Kind::StorageQuota,
            "The tenant has used its quota of stored bytes. It admits more when events reach the end of their retention, or \
             when an operator raises it.",
            STORAGE_RETRY,
        ),
        EmitError::Stale => Problem::busy(),
        EmitError::OtherCell(_) => Problem::new(
            Kind::OtherCell,
            "The tenant has just moved to another cell. Try again shortly.",
        ),
        EmitError::TooLarge => Problem::new(Kind::TooLarge, sentence(&error)),
        EmitError::Database(error) => match error.as_database_error().and_then(|e| e.code()) {
            Some(code) if code == "PR422" => {
                let message = error.as_database_error().map(|e| e.message().to_owned());
                Problem::invalid(below, message.unwrap_or_default())
            }
            _ => error.into(),
        },
    }
}
