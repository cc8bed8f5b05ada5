//! Every call, a few lines each: what it is for, what it takes, what it answers. The statuses that follow from the
//! rule, the method, the path and the body are added by themselves.

use serde_json::{Value, json};

use super::{operation::Operation, shapes};
use crate::{
    api::{
        alerts::AlertForm,
        api_keys::{KeyForm, KeyView},
        audit::AuditView,
        batch::{BatchForm, BatchView},
        deliveries::{DeliveryView, DeliveryWithAttempts},
        endpoint_form::EndpointForm,
        endpoints::EndpointView,
        erasures::ErasureView,
        event_types::{TypeForm, TypeView},
        events::{EmitForm, EventView},
        listeners::{ListenerForm, ListenerView},
        portal_links::LinkView,
        replays::{DryRun, ReplayForm, ReplayView},
        secrets::{RotateForm, Secrets},
        tenants::{TenantForm, TenantView},
        trials::{ProbeReport, TestAttempt, TrialForm},
    },
    auth::Rule::{Admin, Catalogue, Emit, Open, Own},
    tables::{alerts::AlertRow, dead_letters::Group, rotations::RotationRow},
};

const TENANTS: &str = "/v1/tenants";
const TENANT: &str = "/v1/tenants/{tenant}";
const TYPES: &str = "/v1/event-types";
const TYPE: &str = "/v1/event-types/{type}";
const EVENTS: &str = "/v1/tenants/{tenant}/events";
const EVENT: &str = "/v1/tenants/{tenant}/events/{event}";
const ENDPOINTS: &str = "/v1/tenants/{tenant}/endpoints";
const ENDPOINT: &str = "/v1/tenants/{tenant}/endpoints/{endpoint}";
const DELIVERIES: &str = "/v1/tenants/{tenant}/deliveries";
const DELIVERY: &str = "/v1/tenants/{tenant}/deliveries/{delivery}";
const REPLAYS: &str = "/v1/tenants/{tenant}/replays";
const REPLAY: &str = "/v1/tenants/{tenant}/replays/{replay}";
const ALERT: &str = "/v1/tenants/{tenant}/endpoints/{endpoint}/alert";
const KEYS: &str = "/v1/api-keys";

pub(super) fn all() -> impl Iterator<Item = Operation> {
    [
        ("Tenants", tenants()),
        ("Event types", event_types()),
        ("Events", events()),
        ("Endpoints", endpoints()),
        ("Deliveries", deliveries()),
        ("Administration", administration()),
        ("Operation", operation()),
    ]
    .into_iter()
    .flat_map(|(tag, operations)| operations.into_iter().map(move |one| one.in_group(tag)))
}

fn tenants() -> Vec<Operation> {
    vec![
        Operation::get(Admin, TENANTS, "listTenants", "List tenants").answers_page::<TenantView>("By id."),
        Operation::put(Admin, TENANT, "putTenant", "Make or change a tenant")
            .tells("All its settings at once: one that is left out goes back to its default.")
            .may_take::<TenantForm>()
            .answers::<TenantView>(201, "Made.")
            .answers::<TenantView>(200, "Changed."),
        Operation::get(Own, TENANT, "getTenant", "Read a tenant").answers::<TenantView>(200, "The tenant."),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/portal-links",
            "createPortalLink",
            "Make a link to the tenant's own pages",
        )
        .tells("It works once, for a quarter of an hour.")
        .answers::<LinkView>(201, "Made. The link is in this answer only."),
        Operation::delete(Admin, TENANT, "deleteTenant", "Delete a tenant")
            .tells(
                "Its endpoints go with it and its keys no longer work. Answers when nothing more is sent for it. What is \
                 stored of it is removed by a job: `Location` leads to its progress.",
            )
            .answers_nothing("Deleted."),
    ]
}

fn event_types() -> Vec<Operation> {
    vec![
        Operation::get(Catalogue, TYPES, "listEventTypes", "List event types")
            .answers_page::<TypeView>("By name, without the schemas themselves."),
        Operation::put(Admin, TYPE, "putEventType", "Make an event type, or add versions")
            .tells(
                "A published version's schema can't change, and versions that are left out stay. So does `thin`; a \
                 `description` that is left out is taken away. Names that begin with `postrider.` are reserved.",
            )
            .takes::<TypeForm>()
            .answers::<TypeView>(201, "Made.")
            .answers::<TypeView>(
                200,
                "Changed; `compatibility` says what new versions break for readers.",
            )
            .refuses(&[409]),
        Operation::get(Catalogue, TYPE, "getEventType", "Read an event type")
            .answers::<TypeView>(200, "The type with its schemas."),
        Operation::delete(Admin, TYPE, "deleteEventType", "Delete an event type")
            .tells("Events that have the type are kept and delivered; new ones are refused.")
            .answers_nothing("Deleted."),
        Operation::get(
            Catalogue,
            "/v1/catalogue/openapi.json",
            "getCatalogue",
            "Read the catalogue as OpenAPI webhooks",
        )
        .answers_json(200, shapes::value(shapes::object()), "An OpenAPI 3.1 document.")
        .refuses(&[409]),
    ]
}

fn events() -> Vec<Operation> {
    vec![
        Operation::post(Emit, EVENTS, "emitEvent", "Emit an event")
            .takes::<EmitForm<'_>>()
            .answers::<EventView>(202, "Stored, and on its way.")
            .answers::<EventView>(
                200,
                "An event with this id and content was there before: nothing is sent again.",
            ),
        Operation::post(
            Emit,
            "/v1/tenants/{tenant}/events/batch",
            "emitEvents",
            "Emit many events, all or none",
        )
        .takes::<BatchForm<'_>>()
        .answers::<BatchView>(202, "All stored, in the order they were given."),
        Operation::get(Own, EVENTS, "listEvents", "List events")
            .answers_page::<EventView>("The newest first."),
        Operation::get(Own, EVENT, "getEvent", "Read an event with its deliveries")
            .answers::<EventView>(200, "The event."),
    ]
}

fn endpoints() -> Vec<Operation> {
    vec![
        Operation::get(Own, ENDPOINTS, "listEndpoints", "List endpoints")
            .answers_page::<EndpointView>("In the order they were made in."),
        Operation::post(Own, ENDPOINTS, "createEndpoint", "Make an endpoint")
            .takes_some_of::<EndpointForm>("NewEndpoint", |schema| {
                without(schema, "enabled");
                schema["required"] = json!(["url"]);
            })
            .answers::<EndpointView>(201, "Made. The signing secret is in this answer."),
        Operation::get(Own, ENDPOINT, "getEndpoint", "Read an endpoint").answers::<EndpointView>(200, "The endpoint."),
        Operation::patch(Own, ENDPOINT, "changeEndpoint", "Change an endpoint")
            .tells(
                "A field that is not there stays; null goes back to the default. `enabled: false` pauses it, and \
                 deliveries wait. A new host drops custom headers unless they are sent again. Answers when the change \
                 is in effect.",
            )
            .takes_some_of::<EndpointForm>("EndpointChange", |schema| without(schema, "secret"))
            .answers::<EndpointView>(200, "Changed."),
        Operation::delete(Own, ENDPOINT, "deleteEndpoint", "Delete an endpoint")
            .tells("Answers when no more requests to it are begun.")
            .answers_nothing("Deleted."),
        Operation::get(
            Own,
            "/v1/tenants/{tenant}/endpoints/{endpoint}/secret",
            "revealSecrets",
            "Show an endpoint's secrets",
        )
        .tells("Those in force, the newest first. It is written to the audit log.")
        .answers::<Secrets>(200, "The secrets, or the public keys."),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/endpoints/{endpoint}/secret/rotate",
            "rotateSecret",
            "Rotate an endpoint's secret",
        )
        .tells(
            "The new secret signs from now on; the older ones sign too until their time. An event \
             `postrider.secret.rotating` tells endpoints that ask for it.",
        )
        .may_take::<RotateForm>()
        .answers::<Secrets>(200, "The secrets in force, the newest first."),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/endpoints/{endpoint}/test",
            "testEndpoint",
            "Send one test event now",
        )
        .tells(
            "Its data is made from the type's schema, and it has the header `Webhook-Test: true`. It becomes no \
             delivery and counts for nothing. At most 20 a minute for an endpoint.",
        )
        .may_take::<TrialForm>()
        .answers::<TestAttempt>(200, "The attempt, whatever came of it. The answer's body is not told.")
        .refuses(&[429]),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/endpoints/{endpoint}/probe",
            "probeEndpoint",
            "Find out whether a receiver is right",
        )
        .tells(
            "Sends at most 35 test events within 16 seconds, good and bad ones, and says what the answers mean. At most \
             10 in ten minutes for an endpoint.",
        )
        .may_take::<TrialForm>()
        .answers::<ProbeReport>(200, "What was found, with a score.")
        .refuses(&[429]),
        Operation::post(Own, "/v1/tenants/{tenant}/listeners", "createListener", "Listen on your own machine")
            .tells(
                "A temporary endpoint for somebody who develops a receiver. It ends half a minute after nobody reads its \
                 requests. `postrider listen` does all of this.",
            )
            .may_take::<ListenerForm>()
            .answers::<ListenerView>(201, "Made. Read its requests within half a minute."),
        Operation::get(
            Own,
            "/v1/tenants/{tenant}/listeners/{listener}/requests",
            "readListener",
            "Read a listener's requests as they come",
        )
        .tells(
            "The answer goes on for as long as it is read: one JSON object a line, `{}` when nothing has come for a while. \
             Forward `headers` and the bytes in `body` (base64) as they are and the signature verifies. Each is handed over \
             once and not tried again.",
        )
        .answers_in(200, "application/x-ndjson", json!({"type": "string"}), "Lines.")
        .refuses(&[429]),
        Operation::delete(
            Own,
            "/v1/tenants/{tenant}/listeners/{listener}",
            "deleteListener",
            "End a listener",
        )
        .answers_nothing("Ended."),
        Operation::get(Own, "/v1/tenants/{tenant}/rotations", "listRotations", "List how far rotations are")
            .answers_page::<RotationRow>("One for each endpoint."),
        Operation::put(Own, ALERT, "putAlert", "Ask for an alert")
            .tells(
                "One event `postrider.alert.dead_letters` when the endpoint's dead letters are as many, and the next only \
                 after they were fewer.",
            )
            .takes::<AlertForm>()
            .answers::<AlertRow>(200, "The alert."),
        Operation::get(Own, ALERT, "getAlert", "Read an endpoint's alert")
            .answers::<AlertRow>(200, "The alert."),
        Operation::delete(Own, ALERT, "deleteAlert", "Take an alert back").answers_nothing("Taken back."),
    ]
}

fn deliveries() -> Vec<Operation> {
    let text = || json!({"type": "string"});
    let time = || json!({"type": "string", "format": "date-time"});
    vec![
        Operation::get(Own, DELIVERIES, "listDeliveries", "List deliveries")
            .tells("A page may be short, even empty, and still have a `next_cursor` when few match.")
            .query(
                "state",
                shapes::value(shapes::delivery_state()),
                "Where they are.",
            )
            .query("endpoint", text(), "Of this endpoint.")
            .query("type", shapes::value(shapes::type_name()), "Of this event type.")
            .query("event", text(), "Of this event.")
            .query(
                "status_code",
                json!({"type": "integer", "minimum": 100, "maximum": 999}),
                "With this answer to the latest attempt.",
            )
            .query("since", time(), "Of events from then on.")
            .query("until", time(), "Of events before then.")
            .query(
                "format",
                json!({"type": "string", "enum": ["json", "ndjson", "csv"]}),
                "`ndjson` and `csv` are streams of all that match, of any length or of `limit`; `Accept` asks for them too.",
            )
            .answers_page::<DeliveryView>("The newest first.")
            .or_in("application/x-ndjson", json!({"type": "string"}))
            .or_in("text/csv", json!({"type": "string"})),
        Operation::get(Own, DELIVERY, "getDelivery", "Read a delivery with its attempts")
            .answers::<DeliveryWithAttempts>(200, "The delivery."),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/deliveries/{delivery}/replay",
            "replayDelivery",
            "Send a delivery again",
        )
        .tells("Refused with 409 when the delivery has had as many attempts as one can have.")
        .answers::<DeliveryWithAttempts>(202, "It is pending again, due now."),
        Operation::get(
            Own,
            "/v1/tenants/{tenant}/dead-letters",
            "countDeadLetters",
            "Count dead letters by endpoint, type and reason",
        )
        .tells(
            "The counts are kept; with `since` or `until` the dead letters are counted. As a stream the dead letters \
             themselves; in pages they are deliveries in state `dead`.",
        )
        .query("endpoint", text(), "Of this endpoint.")
        .query("type", shapes::value(shapes::type_name()), "Of this event type.")
        .query(
            "reason",
            shapes::value(shapes::dead_reason()),
            "Of those that died of this.",
        )
        .query("since", time(), "Of events from then on.")
        .query("until", time(), "Of events before then.")
        .query(
            "format",
            json!({"type": "string", "enum": ["json", "ndjson", "csv"]}),
            "`ndjson` and `csv` are streams of the dead letters, of any length or of `limit`; `Accept` asks for them too.",
        )
        .answers_page::<Group>("The largest first.")
        .or_in("application/x-ndjson", json!({"type": "string"}))
        .or_in("text/csv", json!({"type": "string"})),
        Operation::post(Own, REPLAYS, "startReplay", "Send many deliveries again")
            .tells(
                "A job that survives restarts. Live deliveries go first; replays hold at most a quarter of an endpoint's \
                 places. `kind: missing` sends what an endpoint never got. Refused with 409 when as many replays of the \
                 tenant are running as it can have.",
            )
            .may_take::<ReplayForm>()
            .answers::<ReplayView>(202, "It has begun.")
            .answers::<DryRun>(200, "What a dry run counted.")
            .refuses(&[409]),
        Operation::get(Own, REPLAYS, "listReplays", "List replays")
            .answers_page::<ReplayView>("The newest first."),
        Operation::get(Own, REPLAY, "getReplay", "Read how far a replay is")
            .answers::<ReplayView>(200, "The replay."),
        Operation::delete(Own, REPLAY, "cancelReplay", "Cancel a replay")
            .tells(
                "Answers when nothing of it is begun any more. What was in line is what it was before: dead, delivered, \
                 waiting for its next attempt, or not there. Only what is on the wire comes to its end.",
            )
            .answers::<ReplayView>(200, "The replay as it is now."),
    ]
}

fn administration() -> Vec<Operation> {
    vec![
        Operation::post(Admin, KEYS, "createApiKey", "Make an API key")
            .takes::<KeyForm>()
            .answers::<KeyView>(201, "Made. The key is in this answer only."),
        Operation::get(Admin, KEYS, "listApiKeys", "List API keys")
            .answers_page::<KeyView>("Without the keys themselves."),
        Operation::delete(Admin, "/v1/api-keys/{key}", "revokeApiKey", "Revoke an API key")
            .answers_nothing("Revoked."),
        Operation::get(
            Admin,
            "/v1/erasures",
            "listErasures",
            "List what became of deleted tenants' data",
        )
        .answers_page::<ErasureView>("The newest first."),
        Operation::get(
            Admin,
            "/v1/erasures/{erasure}",
            "getErasure",
            "Read how far an erasure is",
        )
        .answers::<ErasureView>(200, "The erasure."),
        Operation::get(Admin, "/v1/audit", "listAudit", "List who did what")
            .answers_page::<AuditView>("The newest first."),
    ]
}

fn operation() -> Vec<Operation> {
    let status =
        || json!({"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}});
    vec![
        Operation::get(Open, "/healthz", "getHealth", "Whether the process runs").answers_json(
            200,
            status(),
            "It runs.",
        ),
        Operation::get(Open, "/readyz", "getReadiness", "Whether requests can be served").answers_json(
            200,
            status(),
            "They can.",
        ),
        Operation::get(Admin, "/metrics", "getMetrics", "Figures for Prometheus")
            .tells("Also without a key at POSTRIDER_METRICS_LISTEN.")
            .answers_in(
                200,
                "text/plain",
                json!({"type": "string"}),
                "In Prometheus' text form.",
            ),
        Operation::get(Open, "/openapi.json", "getOpenapi", "This document").answers_json(
            200,
            shapes::value(shapes::object()),
            "OpenAPI 3.1.",
        ),
    ]
}

fn without(schema: &mut Value, property: &str) {
    if let Some(properties) = schema["properties"].as_object_mut() {
        properties.remove(property);
    }
}
