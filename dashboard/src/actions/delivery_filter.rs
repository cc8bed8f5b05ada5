//! Parses the filters of a list of deliveries.

use chrono::{DateTime, Datelike, Utc};
use postrider_dispatcher::statistics::Class;
use postrider_proto::{DeliveryState, limits::ATTEMPTS_PER_DELIVERY_MAX};

use crate::{http::problem::Problem, tables::deliveries::Failure};

pub(crate) fn parse_state(text: &str) -> Result<DeliveryState, Problem> {
    DeliveryState::ALL
        .into_iter()
        .find(|state| state.as_str() == text)
        .ok_or_else(|| {
            Problem::bad_request("Query parameter `state` must be pending, delivered, dead or discarded.")
        })
}

pub(crate) fn parse_status(text: &str) -> Result<i16, Problem> {
    text.parse()
        .ok()
        .filter(|code| (100..1000).contains(code))
        .ok_or_else(|| {
            Problem::bad_request("Query parameter `status_code` must be a number from 100 to 999.")
        })
}

/// Kinds of failure by the words that addresses use, in the order in which they are offered.
pub(crate) const FAILURES: [(&str, Failure); 11] = [
    ("any", Failure::Any),
    ("dns", Failure::Class(Class::NameNotFound)),
    ("connection", Failure::Class(Class::ConnectionFailed)),
    ("tls", Failure::Class(Class::TlsFailed)),
    ("timeout", Failure::Class(Class::TimedOut)),
    ("invalid_response", Failure::Class(Class::InvalidResponse)),
    ("3xx", Failure::Class(Class::Redirected)),
    ("4xx", Failure::Class(Class::ClientError)),
    ("5xx", Failure::Class(Class::ServerError)),
    ("address", Failure::Class(Class::Forbidden)),
    ("not_sent", Failure::Class(Class::NotSent)),
];

pub(crate) fn parse_failure(text: &str) -> Result<Failure, Problem> {
    let found = FAILURES.iter().find(|(word, _)| *word == text);
    let invalid = || Problem::bad_request("Query parameter `failure` must be a kind of failure, like tls.");
    found.map(|(_, failure)| *failure).ok_or_else(invalid)
}

/// The word for a class in addresses.
pub(crate) fn failure_word(class: Class) -> &'static str {
    let found = FAILURES
        .iter()
        .find(|(_, failure)| *failure == Failure::Class(class));
    found.map_or("any", |(word, _)| word)
}

pub(crate) fn parse_attempts(text: &str) -> Result<i16, Problem> {
    text.parse()
        .ok()
        .filter(|count| (1..=ATTEMPTS_PER_DELIVERY_MAX as i16).contains(count))
        .ok_or_else(|| {
            Problem::bad_request(format!(
                "Query parameter `attempts` must be a number from 1 to {ATTEMPTS_PER_DELIVERY_MAX}."
            ))
        })
}

/// Limited to the years that an event id can hold and Postgres can read.
pub(crate) fn parse_time(name: &str, text: &str) -> Result<DateTime<Utc>, Problem> {
    DateTime::parse_from_rfc3339(text)
        .ok()
        .map(|time| time.to_utc())
        .filter(|time| (1970..=9999).contains(&time.year()))
        .ok_or_else(|| {
            Problem::bad_request(format!(
                "`{name}` must be an RFC 3339 time, like 2026-05-28T10:00:00Z."
            ))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_of_the_wrong_form_are_refused() {
        for bad in [
            "infinity",
            "2026",
            "292277-01-01T00:00:00Z",
            "1969-12-31T23:59:59Z",
            "",
        ] {
            assert!(parse_time("since", bad).is_err(), "{bad}");
        }
        assert!(parse_time("since", "2026-05-28T10:00:00+02:00").is_ok());
        for bad in ["99", "1000", "-200", "x", "99999999999"] {
            assert!(parse_status(bad).is_err(), "{bad}");
        }
        assert!(parse_state("Dead").is_err() && parse_state("dead").is_ok());
        assert!(parse_failure("TLS").is_err() && parse_failure("tls").is_ok());
        for bad in ["0", "-1", "1001", "x"] {
            assert!(parse_attempts(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_class_of_failures_can_be_asked_for() {
        for class in Class::ALL.into_iter().filter(|class| *class != Class::Accepted) {
            assert_eq!(
                parse_failure(failure_word(class)).ok(),
                Some(Failure::Class(class))
            );
        }
    }
}
