//! Why an endpoint did or did not get an event. Decided as an emit decides it (`migrations/functions/emit.sql`), by the
//! settings of that time: today's, with the changes of the audit log undone.
//! Invariant: an endpoint with a delivery is not explained away; only one without a delivery has a reason.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use postrider_proto::{
    EndpointState, filter::Filter as EndpointFilter, limits::ENDPOINTS_PER_TENANT_MAX,
    routing::matching_patterns,
};
use postrider_sender::{read_data, read_data_of_body};
use serde_json::Value;

use crate::{
    Pool,
    tables::{
        audit::{self, EndpointChange},
        deliveries,
        endpoints::{self, Subscription},
        events::EventRow,
    },
};

/// Why an endpoint has no delivery of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reason {
    CreatedLater {
        at: DateTime<Utc>,
    },
    /// Since when, if the audit log still has it, and why.
    Disabled {
        since: Option<DateTime<Utc>>,
        cause: Option<String>,
    },
    NotSubscribed {
        types: Vec<String>,
    },
    OtherVersion {
        pinned: String,
    },
    Filtered {
        mismatch: String,
    },
    /// Finished deliveries of an archived event are no longer stored.
    Expired,
    /// Its settings match.
    NotRecorded,
}

/// An endpoint without a delivery of the event.
#[derive(Debug)]
pub(crate) struct Unsent {
    pub(crate) endpoint: Subscription,
    pub(crate) reason: Reason,
    /// Whether the settings that decide have changed since the event.
    pub(crate) has_changed: bool,
}

pub(crate) struct Explained {
    pub(crate) unsent: Vec<Unsent>,
    /// False if so much was changed since that the settings of that time are not known.
    pub(crate) is_certain: bool,
}

/// The endpoints of the event's tenant that are not among those with a delivery.
pub(crate) async fn explain(
    pool: &Pool,
    event: &EventRow,
    has_delivery: impl Fn(&str) -> bool,
) -> sqlx::Result<Explained> {
    let all = endpoints::subscriptions(pool, event.tenant_id, ENDPOINTS_PER_TENANT_MAX).await?;
    let (changes, complete_since) = audit::endpoint_changes(pool, event.tenant_id).await?;
    let at = deliveries::time_of(event.id).unwrap_or_default();
    let data = match &event.full_data {
        Some(data) => std::str::from_utf8(data).ok().and_then(read_data),
        None => read_data_of_body(&event.body),
    };
    let facts = Facts {
        at,
        type_name: &event.type_name,
        version: &event.version,
        data: data.as_ref(),
        is_archived: event.is_archived,
    };
    let unsent = all
        .into_iter()
        .filter(|endpoint| !has_delivery(&endpoint.public_id))
        .map(|endpoint| {
            let own: Vec<&EndpointChange> = changes
                .iter()
                .filter(|change| change.endpoint == endpoint.public_id)
                .collect();
            let then = Then::of(&endpoint, &own, at);
            Unsent {
                reason: facts.judge(&endpoint, &then),
                has_changed: then.has_changed,
                endpoint,
            }
        })
        .collect();
    let is_certain = complete_since.is_none_or(|since| since <= at);
    Ok(Explained { unsent, is_certain })
}

struct Facts<'a> {
    at: DateTime<Utc>,
    type_name: &'a str,
    version: &'a str,
    data: Option<&'a Value>,
    is_archived: bool,
}

/// An endpoint's settings when the event was emitted.
struct Then {
    state: EndpointState,
    disabled: Option<(DateTime<Utc>, Option<String>)>,
    types: Vec<String>,
    versions: BTreeMap<String, String>,
    /// The filter of that time and all later ones: it applies when an event is sent, which may be later.
    filters: Vec<Value>,
    has_changed: bool,
}

impl Then {
    /// `changes` are those of the endpoint, newest first.
    fn of(endpoint: &Subscription, changes: &[&EndpointChange], at: DateTime<Utc>) -> Self {
        let mut then = Self {
            state: endpoint.state,
            disabled: None,
            types: endpoint.types.clone(),
            versions: endpoint.versions.clone().map(|json| json.0).unwrap_or_default(),
            filters: endpoint.filter.iter().map(|json| json.0.clone()).collect(),
            has_changed: false,
        };
        let (later, earlier): (Vec<&EndpointChange>, Vec<&EndpointChange>) =
            changes.iter().copied().partition(|change| change.at > at);
        for change in later {
            then.has_changed = true;
            then.undo(change);
        }
        let is_disabled = |change: &&&EndpointChange| change.state_after == Some("disabled".into());
        then.disabled = earlier
            .iter()
            .find(is_disabled)
            .map(|change| (change.at, change.reason.clone()));
        then
    }

    fn undo(&mut self, change: &EndpointChange) {
        if let Some(state) = read::<EndpointState>(&change.state_before) {
            self.state = state;
        }
        if let Some(types) = read(&change.types_before) {
            self.types = types;
        }
        if let Some(versions) = read::<Option<BTreeMap<String, String>>>(&change.versions_before) {
            self.versions = versions.unwrap_or_default();
        }
        if let Some(filter) = change.filter_before.as_ref().filter(|filter| !filter.is_null()) {
            self.filters.insert(0, filter.clone());
        }
    }
}

fn read<T: serde::de::DeserializeOwned>(value: &Option<Value>) -> Option<T> {
    serde_json::from_value(value.clone()?).ok()
}

impl Facts<'_> {
    fn judge(&self, endpoint: &Subscription, then: &Then) -> Reason {
        if endpoint.created_at > self.at {
            return Reason::CreatedLater {
                at: endpoint.created_at,
            };
        }
        if then.state == EndpointState::Disabled {
            let (since, cause) = then.disabled.clone().unzip();
            return Reason::Disabled {
                since,
                cause: cause.flatten(),
            };
        }
        let patterns = matching_patterns(self.type_name);
        if !then.types.iter().any(|subscribed| patterns.contains(subscribed)) {
            return Reason::NotSubscribed {
                types: then.types.clone(),
            };
        }
        if let Some(pinned) = then
            .versions
            .get(self.type_name)
            .filter(|pinned| *pinned != self.version)
        {
            let pinned = pinned.clone();
            return Reason::OtherVersion { pinned };
        }
        let mismatch = |filter: &Value| EndpointFilter::read(filter).ok()?.mismatch(self.data?);
        if let Some(mismatch) = then.filters.iter().find_map(mismatch) {
            return Reason::Filtered { mismatch };
        }
        match self.is_archived {
            true => Reason::Expired,
            false => Reason::NotRecorded,
        }
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;
    use serde_json::json;
    use sqlx::types::Json;

    use super::*;

    fn noon() -> DateTime<Utc> {
        DateTime::from_timestamp(1_800_000_000, 0).expect("a time")
    }

    fn minutes(count: i64) -> DateTime<Utc> {
        noon() + TimeDelta::minutes(count)
    }

    fn endpoint() -> Subscription {
        Subscription {
            public_id: "ep_1".to_owned(),
            url: "https://a.example/hook".to_owned(),
            state: EndpointState::Active,
            types: vec!["invoice.*".to_owned()],
            versions: None,
            filter: None,
            created_at: minutes(-60),
        }
    }

    fn reason(endpoint: &Subscription, changes: &[EndpointChange]) -> Reason {
        let data = json!({"amount": 5});
        let facts = Facts {
            at: noon(),
            type_name: "invoice.paid",
            version: "2026-06-01",
            data: Some(&data),
            is_archived: false,
        };
        let changes: Vec<&EndpointChange> = changes.iter().collect();
        facts.judge(endpoint, &Then::of(endpoint, &changes, noon()))
    }

    #[test]
    fn each_setting_is_a_reason() {
        assert_eq!(reason(&endpoint(), &[]), Reason::NotRecorded);
        let later = Subscription {
            created_at: minutes(1),
            ..endpoint()
        };
        assert_eq!(reason(&later, &[]), Reason::CreatedLater { at: minutes(1) });
        let types = vec!["order.*".to_owned(), "invoice.void".to_owned()];
        let other = Subscription {
            types: types.clone(),
            ..endpoint()
        };
        assert_eq!(reason(&other, &[]), Reason::NotSubscribed { types });
        let pins = BTreeMap::from([("invoice.paid".to_owned(), "2026-01-15".to_owned())]);
        let pinned = Subscription {
            versions: Some(Json(pins)),
            ..endpoint()
        };
        let version = "2026-01-15".to_owned();
        assert_eq!(reason(&pinned, &[]), Reason::OtherVersion { pinned: version });
        let filtered = Subscription {
            filter: Some(Json(json!({"/amount": {"gt": 9}}))),
            ..endpoint()
        };
        let mismatch = "`/amount` must be greater than 9, but is 5".to_owned();
        assert_eq!(reason(&filtered, &[]), Reason::Filtered { mismatch });
    }

    #[test]
    fn settings_are_those_of_the_time_of_the_event() {
        let enabled_later = EndpointChange {
            at: minutes(10),
            state_before: Some(json!("disabled")),
            state_after: Some(json!("active")),
            ..EndpointChange::default()
        };
        let disabled_before = EndpointChange {
            at: minutes(-10),
            state_before: Some(json!("active")),
            state_after: Some(json!("disabled")),
            reason: Some("gone".to_owned()),
            ..EndpointChange::default()
        };
        let disabled = Reason::Disabled {
            since: Some(minutes(-10)),
            cause: Some("gone".to_owned()),
        };
        assert_eq!(reason(&endpoint(), &[enabled_later, disabled_before]), disabled);

        let subscribed_later = EndpointChange {
            at: minutes(10),
            types_before: Some(json!(["order.*"])),
            ..EndpointChange::default()
        };
        let types = vec!["order.*".to_owned()];
        assert_eq!(
            reason(&endpoint(), &[subscribed_later]),
            Reason::NotSubscribed { types }
        );

        let unpinned_later = EndpointChange {
            at: minutes(10),
            versions_before: Some(json!({"invoice.paid": "1"})),
            ..EndpointChange::default()
        };
        let pinned = "1".to_owned();
        assert_eq!(
            reason(&endpoint(), &[unpinned_later]),
            Reason::OtherVersion { pinned }
        );

        let disabled_later = Subscription {
            state: EndpointState::Disabled,
            ..endpoint()
        };
        let change = EndpointChange {
            at: minutes(10),
            state_before: Some(json!("active")),
            state_after: Some(json!("disabled")),
            ..EndpointChange::default()
        };
        assert_eq!(reason(&disabled_later, &[change]), Reason::NotRecorded);
    }
}
