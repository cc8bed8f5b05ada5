//! Parses the filters of a list of deliveries.

use chrono::{DateTime, Datelike, Utc};
use postrider_proto::DeliveryState;

use crate::http::problem::Problem;

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
    }
}
