//! Filters that several lists have: how they are read from an address, and what is wrong with them.

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use postrider_proto::routing::is_type_name;

use crate::{
    Pool,
    actions::delivery_filter::parse_time,
    http::problem::{Faults, Problem, excerpt},
    tables::{self, event_types},
};

/// Event types suggested by a filter.
const TYPES_OFFERED_MAX: i64 = 200;
/// Time ranges offered by a filter: the value in the address, the label, and the minutes.
pub(super) const WITHIN: [(&str, &str, i64); 4] = [
    ("15m", "last 15 minutes", 15),
    ("1h", "last hour", 60),
    ("24h", "last 24 hours", 24 * 60),
    ("7d", "last 7 days", 7 * 24 * 60),
];
/// What a time must be.
pub(super) const TIME: &str = "a date and a time";

pub(super) async fn offered_types(pool: &Pool) -> sqlx::Result<Vec<String>> {
    let rows = event_types::list(pool, "", TYPES_OFFERED_MAX).await?;
    Ok(rows.into_iter().map(|row| row.name).collect())
}

/// A filter that was filled in.
pub(super) fn given(text: &str) -> Option<&str> {
    Some(text.trim()).filter(|text| !text.is_empty())
}

/// The value of a filter. One that can't be read is a fault: it must be as the rule says.
pub(super) fn read<T>(
    faults: &mut Faults,
    (field, text): (&str, &str),
    parse: impl Fn(&str) -> Result<T, Problem>,
    rule: &str,
) -> Option<T> {
    let text = given(text)?;
    let parsed = parse(text);
    if parsed.is_err() {
        faults.add(field, format!("must be {rule}, not {:?}", excerpt(text)));
    }
    parsed.ok()
}

pub(super) fn check_type(faults: &mut Faults, name: Option<&str>) {
    let rule = "lower-case letters, digits, underscores and dots";
    if let Some(name) = name.filter(|name| !is_type_name(name)) {
        faults.add(
            "type",
            format!("must contain only {rule}, not {:?}", excerpt(name)),
        );
    }
}

/// The later of a time and the beginning of one of the ranges offered.
pub(super) async fn since_within(
    pool: &Pool,
    within: &str,
    since: Option<DateTime<Utc>>,
) -> sqlx::Result<Option<DateTime<Utc>>> {
    let Some((_, _, minutes)) = WITHIN.iter().find(|(word, _, _)| *word == within) else {
        return Ok(since);
    };
    let start = tables::now(pool).await? - TimeDelta::minutes(*minutes);
    Ok(since.max(Some(start)))
}

/// RFC 3339, or the format of `datetime-local` inputs, which is read as UTC.
pub(super) fn read_time(name: &str, text: &str) -> Result<DateTime<Utc>, Problem> {
    parse_time(name, &time_from_form(text))
}

/// The value of a `datetime-local` input as RFC 3339; any other text as it is.
pub(super) fn time_from_form(text: &str) -> String {
    let plain = NaiveDateTime::parse_from_str(text, "%Y-%m-%dT%H:%M")
        .or_else(|_| NaiveDateTime::parse_from_str(text, "%Y-%m-%dT%H:%M:%S"));
    match plain {
        Ok(time) => time.and_utc().to_rfc3339(),
        Err(_) => text.to_owned(),
    }
}

/// A time as the value of a `datetime-local` input, in UTC; any other text as it is.
pub(super) fn time_for_form(text: &str) -> String {
    match DateTime::parse_from_rfc3339(text) {
        Ok(time) => time.to_utc().format("%Y-%m-%dT%H:%M:%S").to_string(),
        Err(_) => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_browsers_and_as_rfc_3339() {
        let at = |text| read_time("since", text).map(|time| time.timestamp()).ok();
        assert_eq!(at("2026-05-28T10:00"), at("2026-05-28T12:00:00+02:00"));
        assert_eq!(at("yesterday"), None);
        assert_eq!(time_for_form("2026-05-28T12:00:00+02:00"), "2026-05-28T10:00:00");
        assert_eq!(time_for_form("2026-05-28T10:00"), "2026-05-28T10:00");
    }
}
