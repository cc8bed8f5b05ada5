//! Every API operation: its purpose, request and responses. Error statuses that follow from the rule, the method, the
//! path and the body are added automatically.

use serde_json::{Value, json};

use super::operation::Operation;
use crate::{
    actions::{
        api_keys::{KeyForm, KeyView},
        delivery_view::DeliveryView,
        endpoints::form::EndpointForm,
        replays::{DryRun, ReplayForm},
        tenants::TenantForm,
        trials::{ProbeReport, TestAttempt},
    },
    api::{
        alerts::AlertForm,
        audit::AuditView,
        batch::{BatchForm, BatchView},
        dead_letters::GroupView,
        deliveries::DeliveryWithAttempts,
        endpoints::EndpointView,
        erasures::ErasureView,
        event_types::{TypeForm, TypeView},
        events::{EmitForm, EventView},
        listeners::{ListenerForm, ListenerView},
        portal_links::LinkView,
        replays::ReplayView,
        secrets::{RotateForm, Secrets},
        tenants::TenantView,
        trials::TrialForm,
    },
    auth::Rule::{Admin, Catalogue, Emit, Open, Own},
    http::shapes,
    tables::{alerts::AlertRow, rotations::RotationRow},
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
        ("System", system()),
    ]
    .into_iter()
    .flat_map(|(tag, operations)| operations.into_iter().map(move |one| one.in_group(tag)))
}

fn tenants() -> Vec<Operation> {
    vec![
        Operation::get(Admin, TENANTS, "listTenants", "List tenants").returns_page::<TenantView>("A page of tenants, ordered by id."),
        Operation::put(Admin, TENANT, "putTenant", "Create or update a tenant")
            .describe("Replaces all settings: a setting that is omitted is reset to its default.")
            .may_accept::<TenantForm>()
            .returns::<TenantView>(201, "The tenant was created.")
            .returns::<TenantView>(200, "The tenant was updated."),
        Operation::get(Own, TENANT, "getTenant", "Retrieve a tenant").returns::<TenantView>(200, "The tenant."),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/portal-links",
            "createPortalLink",
            "Create a portal link",
        )
        .describe("Lets a customer into the pages of their own tenant. The link can be used once, within 15 minutes.")
        .returns::<LinkView>(201, "The link. It is returned only once."),
        Operation::delete(Admin, TENANT, "deleteTenant", "Delete a tenant")
            .describe(
                "Deletes the tenant with its endpoints and revokes its keys. Responds once nothing more is sent for it. A \
                 background job erases its stored data: `Location` points to its progress.",
            )
            .returns_nothing("The tenant was deleted."),
    ]
}

fn event_types() -> Vec<Operation> {
    vec![
        Operation::get(Catalogue, TYPES, "listEventTypes", "List event types")
            .returns_page::<TypeView>("A page of event types, ordered by name, without their schemas."),
        Operation::put(Admin, TYPE, "putEventType", "Create an event type or add versions")
            .describe(
                "A published version's schema can't be changed: a different one is a 409 `schema-version-published`. \
                 Versions and `thin` are kept if omitted; an omitted `description` is removed. Names starting with \
                 `postrider.` are reserved.",
            )
            .accepts::<TypeForm>()
            .returns::<TypeView>(201, "The event type was created.")
            .returns::<TypeView>(
                200,
                "The event type was updated. `compatibility` lists what the new versions break for consumers.",
            )
            .fails_with(&[409]),
        Operation::get(Catalogue, TYPE, "getEventType", "Retrieve an event type")
            .returns::<TypeView>(200, "The event type with its schemas."),
        Operation::delete(Admin, TYPE, "deleteEventType", "Delete an event type")
            .describe("Existing events of this type are kept and delivered; new ones are rejected.")
            .returns_nothing("The event type was deleted."),
        Operation::get(
            Catalogue,
            "/v1/catalogue/openapi.json",
            "getCatalogue",
            "Retrieve the catalogue as OpenAPI webhooks",
        )
        .returns_json(200, shapes::value(shapes::object()), "An OpenAPI 3.1 document with one webhook per event type.")
        .fails_with(&[409]),
    ]
}

fn events() -> Vec<Operation> {
    vec![
        Operation::post(Emit, EVENTS, "emitEvent", "Emit an event")
            .accepts::<EmitForm<'_>>()
            .returns::<EventView>(202, "The event was stored and is queued for delivery.")
            .returns::<EventView>(
                200,
                "An event with this id and the same content already exists; nothing is sent again.",
            ),
        Operation::post(
            Emit,
            "/v1/tenants/{tenant}/events/batch",
            "emitEvents",
            "Emit a batch of events",
        )
        .describe("Stores all events or none.")
        .accepts::<BatchForm<'_>>()
        .returns::<BatchView>(202, "All events were stored, in the order of the request."),
        Operation::get(Own, EVENTS, "listEvents", "List events")
            .returns_page::<EventView>("A page of events, newest first."),
        Operation::get(Own, EVENT, "getEvent", "Retrieve an event with its deliveries")
            .returns::<EventView>(200, "The event with its deliveries."),
    ]
}

fn endpoints() -> Vec<Operation> {
    vec![
        Operation::get(Own, ENDPOINTS, "listEndpoints", "List endpoints")
            .returns_page::<EndpointView>("A page of endpoints, in order of creation."),
        Operation::post(Own, ENDPOINTS, "createEndpoint", "Create an endpoint")
            .accepts_part_of::<EndpointForm>("NewEndpoint", |schema| {
                without(schema, "enabled");
                schema["required"] = json!(["url"]);
            })
            .returns::<EndpointView>(201, "The endpoint with its signing secret."),
        Operation::get(Own, ENDPOINT, "getEndpoint", "Retrieve an endpoint").returns::<EndpointView>(200, "The endpoint."),
        Operation::patch(Own, ENDPOINT, "updateEndpoint", "Update an endpoint")
            .describe(
                "Omitted fields are left unchanged; null resets a field to its default. `enabled: false` pauses the \
                 endpoint, and its deliveries are queued; `true` resumes or re-enables it. A URL with a new host drops \
                 custom headers unless they are sent again. Responds once the change is in effect.",
            )
            .accepts_part_of::<EndpointForm>("EndpointUpdate", |schema| without(schema, "secret"))
            .returns::<EndpointView>(200, "The updated endpoint."),
        Operation::delete(Own, ENDPOINT, "deleteEndpoint", "Delete an endpoint")
            .describe("Responds once no more requests to it are started.")
            .returns_nothing("The endpoint was deleted."),
        Operation::get(
            Own,
            "/v1/tenants/{tenant}/endpoints/{endpoint}/secret",
            "revealSecrets",
            "Reveal an endpoint's secrets",
        )
        .describe("Returns the active secrets, newest first. The access is recorded in the audit log.")
        .returns::<Secrets>(200, "The active secrets; for key pairs, the public keys."),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/endpoints/{endpoint}/secret/rotate",
            "rotateSecret",
            "Rotate an endpoint's secret",
        )
        .describe(
            "The new secret signs from now on; older secrets also sign until they retire. Endpoints that subscribe to \
             `postrider.secret.rotating` are notified.",
        )
        .may_accept::<RotateForm>()
        .returns::<Secrets>(200, "The active secrets, newest first."),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/endpoints/{endpoint}/test",
            "testEndpoint",
            "Send a test event",
        )
        .describe(
            "Sends one synthetic event now, with data generated from the type's schema and the header \
             `Webhook-Test: true`. It is not recorded as a delivery. Limited to 20 per minute and endpoint.",
        )
        .may_accept::<TrialForm>()
        .returns::<TestAttempt>(200, "The attempt, successful or not, without the response body.")
        .fails_with(&[429]),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/endpoints/{endpoint}/probe",
            "probeEndpoint",
            "Probe an endpoint",
        )
        .describe(
            "Tests the receiver's implementation with up to 35 valid and invalid test events within 16 seconds, and \
             reports how to fix failed checks. Limited to 10 per ten minutes and endpoint.",
        )
        .may_accept::<TrialForm>()
        .returns::<ProbeReport>(200, "The result of each check, with a score.")
        .fails_with(&[429]),
        Operation::post(Own, "/v1/tenants/{tenant}/listeners", "createListener", "Create a listener")
            .describe(
                "Creates a temporary endpoint for developing a receiver on your own machine. It expires 30 seconds after \
                 its requests are no longer read. `postrider listen` does all of this for you.",
            )
            .may_accept::<ListenerForm>()
            .returns::<ListenerView>(201, "The listener. Read its requests within 30 seconds."),
        Operation::get(
            Own,
            "/v1/tenants/{tenant}/listeners/{listener}/requests",
            "streamListenerRequests",
            "Stream a listener's requests",
        )
        .describe(
            "Streams one JSON object per line for as long as it is read, and `{}` as a keep-alive. Forward `headers` and the \
             bytes in `body` (base64) unchanged, and the signature verifies. Each request is handed over once and not \
             retried.",
        )
        .returns_in(200, "application/x-ndjson", json!({"type": "string"}), "Newline-delimited JSON.")
        .fails_with(&[429]),
        Operation::delete(
            Own,
            "/v1/tenants/{tenant}/listeners/{listener}",
            "deleteListener",
            "Delete a listener",
        )
        .returns_nothing("The listener was deleted."),
        Operation::get(Own, "/v1/tenants/{tenant}/rotations", "listRotations", "List secret rotations")
            .returns_page::<RotationRow>("A page with the rotation status of each endpoint."),
        Operation::put(Own, ALERT, "putAlert", "Create or update an alert")
            .describe(
                "Emits one event `postrider.alert.dead_letters` when the endpoint's dead letters reach the threshold, and \
                 the next one only after they have dropped below it.",
            )
            .accepts::<AlertForm>()
            .returns::<AlertRow>(200, "The alert."),
        Operation::get(Own, ALERT, "getAlert", "Retrieve an alert")
            .returns::<AlertRow>(200, "The alert."),
        Operation::delete(Own, ALERT, "deleteAlert", "Delete an alert").returns_nothing("The alert was deleted."),
    ]
}

fn deliveries() -> Vec<Operation> {
    let text = || json!({"type": "string"});
    let time = || json!({"type": "string", "format": "date-time"});
    vec![
        Operation::get(Own, DELIVERIES, "listDeliveries", "List deliveries")
            .describe("If few deliveries match, a page may be short or even empty and still have a `next_cursor`.")
            .query(
                "state",
                shapes::value(shapes::delivery_state()),
                "Only deliveries in this state.",
            )
            .query("endpoint", text(), "Only deliveries of this endpoint.")
            .query("type", shapes::value(shapes::type_name()), "Only deliveries of this event type.")
            .query("event", text(), "Only deliveries of this event.")
            .query(
                "status_code",
                json!({"type": "integer", "minimum": 100, "maximum": 999}),
                "Only deliveries whose last response had this HTTP status.",
            )
            .query("since", time(), "Only events created at or after this time.")
            .query("until", time(), "Only events created before this time.")
            .query(
                "format",
                json!({"type": "string", "enum": ["json", "ndjson", "csv"]}),
                "`ndjson` and `csv` stream all matching deliveries, or the first `limit`. The `Accept` header works too.",
            )
            .returns_page::<DeliveryView>("A page of deliveries, newest first.")
            .or_in("application/x-ndjson", json!({"type": "string"}))
            .or_in("text/csv", json!({"type": "string"})),
        Operation::get(Own, DELIVERY, "getDelivery", "Retrieve a delivery with its attempts")
            .returns::<DeliveryWithAttempts>(200, "The delivery with its attempts."),
        Operation::post(
            Own,
            "/v1/tenants/{tenant}/deliveries/{delivery}/replay",
            "replayDelivery",
            "Replay a delivery",
        )
        .describe(
            "Queues the delivery again, due now. Returns 409 `endpoint-disabled` if its endpoint is disabled and 409 \
             `limit-reached` if it has reached the maximum number of attempts.",
        )
        .returns::<DeliveryWithAttempts>(202, "The delivery, pending again."),
        Operation::get(
            Own,
            "/v1/tenants/{tenant}/dead-letters",
            "countDeadLetters",
            "Count dead letters by endpoint, type and reason",
        )
        .describe(
            "Reads maintained counters; with `since` or `until` the dead letters are counted one by one. The `ndjson` and \
             `csv` formats stream the dead letters themselves; for a paged list use deliveries in state `dead`.",
        )
        .query("endpoint", text(), "Only dead letters of this endpoint.")
        .query("type", shapes::value(shapes::type_name()), "Only dead letters of this event type.")
        .query(
            "reason",
            shapes::value(shapes::dead_reason()),
            "Only dead letters with this reason.",
        )
        .query("since", time(), "Only events created at or after this time.")
        .query("until", time(), "Only events created before this time.")
        .query(
            "format",
            json!({"type": "string", "enum": ["json", "ndjson", "csv"]}),
            "`ndjson` and `csv` stream all matching dead letters, or the first `limit`. The `Accept` header works too.",
        )
        .returns_page::<GroupView>("A page of groups, largest first.")
        .or_in("application/x-ndjson", json!({"type": "string"}))
        .or_in("text/csv", json!({"type": "string"})),
        Operation::post(Own, REPLAYS, "startReplay", "Start a bulk replay")
            .describe(
                "Starts a job that survives restarts. Live deliveries go first: replays use at most a quarter of an \
                 endpoint's concurrency. `kind: missing` sends events that the endpoint missed. Returns 409 \
                 `limit-reached` if too many replays of the tenant are running.",
            )
            .may_accept::<ReplayForm>()
            .returns::<ReplayView>(202, "The replay was started.")
            .returns::<DryRun>(200, "The result of a dry run.")
            .fails_with(&[409]),
        Operation::get(Own, REPLAYS, "listReplays", "List replays")
            .returns_page::<ReplayView>("A page of replays, newest first."),
        Operation::get(Own, REPLAY, "getReplay", "Retrieve a replay")
            .returns::<ReplayView>(200, "The replay with its progress."),
        Operation::delete(Own, REPLAY, "cancelReplay", "Cancel a replay")
            .describe(
                "Responds once no more of its requests are started. Queued deliveries are restored to their previous \
                 state: dead, delivered, waiting for a retry, or absent. Requests in flight finish.",
            )
            .returns::<ReplayView>(200, "The replay in its current state."),
    ]
}

fn administration() -> Vec<Operation> {
    vec![
        Operation::post(Admin, KEYS, "createApiKey", "Create an API key")
            .accepts::<KeyForm>()
            .returns::<KeyView>(201, "The API key. The key itself is returned only once."),
        Operation::get(Admin, KEYS, "listApiKeys", "List API keys")
            .returns_page::<KeyView>("A page of API keys, without the keys themselves."),
        Operation::delete(Admin, "/v1/api-keys/{key}", "revokeApiKey", "Revoke an API key")
            .returns_nothing("The API key was revoked."),
        Operation::get(Admin, "/v1/erasures", "listErasures", "List erasures")
            .describe("Jobs that erase the data of deleted tenants.")
            .returns_page::<ErasureView>("A page of erasures, newest first."),
        Operation::get(
            Admin,
            "/v1/erasures/{erasure}",
            "getErasure",
            "Retrieve an erasure",
        )
        .returns::<ErasureView>(200, "The erasure with its progress."),
        Operation::get(Admin, "/v1/audit", "listAudit", "List audit log entries")
            .returns_page::<AuditView>("A page of audit log entries, newest first."),
    ]
}

fn system() -> Vec<Operation> {
    let status =
        || json!({"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}});
    vec![
        Operation::get(Open, "/healthz", "getHealth", "Liveness check").returns_json(
            200,
            status(),
            "The process is running.",
        ),
        Operation::get(Open, "/readyz", "getReadiness", "Readiness check").returns_json(
            200,
            status(),
            "Requests can be served.",
        ),
        Operation::get(Admin, "/metrics", "getMetrics", "Prometheus metrics")
            .describe("Also served without a key at POSTRIDER_METRICS_LISTEN.")
            .returns_in(
                200,
                "text/plain",
                json!({"type": "string"}),
                "Metrics in Prometheus text format.",
            ),
        Operation::get(Open, "/openapi.json", "getOpenapi", "OpenAPI document").returns_json(
            200,
            shapes::value(shapes::object()),
            "This document, OpenAPI 3.1.",
        ),
    ]
}

fn without(schema: &mut Value, property: &str) {
    if let Some(properties) = schema["properties"].as_object_mut() {
        properties.remove(property);
    }
}
