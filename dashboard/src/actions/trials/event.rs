//! Synthetic events for tests and probes: of a type that the endpoint subscribes to, with data generated from its
//! schema.

use axum::body::Bytes;
use chrono::{DateTime, SecondsFormat, Utc};
use postrider_proto::{EventId, routing::is_type_name};
use postrider_sender::sample;
use serde_json::{Map, Value};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    http::problem::{Fault, Problem, excerpt},
    tables::{
        endpoints::EndpointRow,
        event_types::{self, EventTypeRow},
        schemas,
    },
};

/// For an endpoint whose types are not in the catalogue.
const PLAIN_TYPE: &str = "postrider.test";
const PLAIN_VERSION: &str = "2026-11-01";
const PLAIN_DATA: &str = r#"{"object":"test","id":"test_sample_1"}"#;
/// Types tried until one has a sample.
const TYPES_TRIED_MAX: i64 = 10;

/// The template for test events of one type.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) type_name: String,
    pub(crate) version: String,
    data: String,
}

/// One event, ready to be signed.
#[derive(Debug, Clone)]
pub(crate) struct TestEvent {
    pub(crate) id: String,
    pub(crate) body: Bytes,
}

impl Model {
    /// Of the requested type, or of the first one that the endpoint subscribes to.
    pub(crate) async fn choose(
        connection: &mut PgConnection,
        endpoint: &EndpointRow,
        asked: Option<&str>,
    ) -> Result<Self, Problem> {
        if let Some(name) = asked {
            let unknown =
                || Problem::invalid("/type", format!("event type `{}` does not exist", excerpt(name)));
            let row = match is_type_name(name) {
                true => event_types::find(&mut *connection, name).await?,
                false => None,
            };
            return match Self::of(connection, endpoint, &row.ok_or_else(unknown)?).await? {
                Ok(model) => Ok(model),
                Err(faults) => Err(Problem::faults(faults)),
            };
        }
        let wanted = &endpoint.settings.types;
        for row in event_types::matching(&mut *connection, wanted, TYPES_TRIED_MAX).await? {
            if let Ok(model) = Self::of(&mut *connection, endpoint, &row).await? {
                return Ok(model);
            }
        }
        Ok(Self {
            type_name: PLAIN_TYPE.to_owned(),
            version: PLAIN_VERSION.to_owned(),
            data: PLAIN_DATA.to_owned(),
        })
    }

    async fn of(
        connection: &mut PgConnection,
        endpoint: &EndpointRow,
        row: &EventTypeRow,
    ) -> Result<Result<Self, Vec<Fault>>, Problem> {
        let pinned = endpoint
            .settings
            .versions
            .as_ref()
            .and_then(|map| map.0.get(&row.name));
        let published = schemas::of_type(connection, row.id).await?;
        let schema = match pinned {
            Some(version) => published.into_iter().find(|schema| schema.version == *version),
            None => published.into_iter().next_back(),
        };
        let fault = |detail: String| {
            vec![Fault {
                pointer: "/type".to_owned(),
                detail,
            }]
        };
        let Some(schema) = schema else {
            return Ok(Err(fault(
                "the event type does not have the version that the endpoint is pinned to".to_owned(),
            )));
        };
        let value = serde_json::from_str(schema.schema.get()).unwrap_or(Value::Bool(true));
        Ok(match sample(&value) {
            Ok(data) => Ok(Self {
                type_name: row.name.clone(),
                version: schema.version,
                data: if row.thin { thin(&data) } else { data },
            }),
            Err(violations) => Err(violations
                .into_iter()
                .flat_map(|one| {
                    fault(format!(
                        "no sample data could be generated for the schema: {} {}",
                        one.pointer, one.message
                    ))
                })
                .collect()),
        })
    }

    /// A new event with this time. With a sequence it looks like one with an ordering key.
    pub(crate) fn event(&self, at: DateTime<Utc>, sequence: Option<i64>) -> TestEvent {
        let id = EventId(Uuid::now_v7()).generated();
        let body = compose(&id, &self.type_name, at, &self.version, sequence, &self.data);
        TestEvent {
            id,
            body: body.into(),
        }
    }
}

/// Same format as `postrider.compose_body`.
pub(crate) fn compose(
    id: &str,
    type_name: &str,
    at: DateTime<Utc>,
    version: &str,
    sequence: Option<i64>,
    data: &str,
) -> String {
    let at = at.to_rfc3339_opts(SecondsFormat::Millis, true);
    let sequence = sequence.map(|n| format!("\"sequence\":{n},")).unwrap_or_default();
    format!(
        r#"{{"id":"{id}","type":"{type_name}","created_at":"{at}","api_version":"{version}",{sequence}"data":{data}}}"#
    )
}

/// Same format as `postrider.thin_data`.
pub(crate) fn thin(data: &str) -> String {
    let all: Map<String, Value> = serde_json::from_str(data).unwrap_or_default();
    let kept: Vec<String> = ["object", "id", "type"]
        .into_iter()
        .filter_map(|name| {
            let value = all
                .get(name)
                .filter(|value| value.is_string() || value.is_number())?;
            Some(format!("\"{name}\":{value}"))
        })
        .collect();
    format!("{{{}}}", kept.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_has_the_form_of_every_body() {
        let at = DateTime::from_timestamp_millis(1_779_962_400_000).expect("a time");
        assert_eq!(
            compose("evt_1", "invoice.paid", at, "v1", Some(2), r#"{"a":1}"#),
            r#"{"id":"evt_1","type":"invoice.paid","created_at":"2026-05-28T10:00:00.000Z","api_version":"v1","sequence":2,"data":{"a":1}}"#
        );
    }

    #[test]
    fn a_thin_body_says_what_it_is_about() {
        assert_eq!(
            thin(r#"{"id":"i","object":"invoice","type":[],"x":1}"#),
            r#"{"object":"invoice","id":"i"}"#
        );
    }
}
