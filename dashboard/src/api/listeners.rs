//! Listeners: temporary endpoints whose requests a developer's machine reads from here.

use axum::{
    extract::Path,
    http::{HeaderName, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use postrider_proto::api::{Listener, NewListener};
use serde_json::json;

use crate::{
    actions::listeners::{self, Wanted},
    auth::{Call, Rule::Own},
    http::{
        idempotency::{Claim, Work},
        input::OptionalBody,
        problem::{Kind, Problem},
    },
    openapi::Operation,
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post(Own, "/v1/tenants/{tenant}/listeners", create)
            .named("createListener", "Create a listener")
            .describe(
                "Creates a temporary endpoint for developing a receiver on your own machine. It expires 30 seconds after \
                 its requests are no longer read. `postrider listen` does all of this for you.",
            )
            .may_accept::<NewListener>()
            .returns::<Listener>(201, "The listener. Read its requests within 30 seconds."),
        Operation::get(Own, "/v1/tenants/{tenant}/listeners/{listener}/requests", requests)
            .named("streamListenerRequests", "Stream a listener's requests")
            .describe(
                "Streams one JSON object per line for as long as it is read, and `{}` as a keep-alive. Forward `headers` and the \
                 bytes in `body` (base64) unchanged, and the signature verifies. Each request is handed over once and not \
                 retried.",
            )
            .returns_in(200, "application/x-ndjson", json!({"type": "string"}), "Newline-delimited JSON.")
            .fails_with(&[429]),
        Operation::delete(Own, "/v1/tenants/{tenant}/listeners/{listener}", delete)
            .named("deleteListener", "Delete a listener")
            .returns_nothing("The listener was deleted."),
    ]
}

async fn create(
    call: Call,
    claim: Claim,
    OptionalBody(form): OptionalBody<NewListener>,
) -> Result<Response, Problem> {
    let wanted = Wanted::read(form)?;
    let mut work = Work::begin(&call.app, claim).await?;
    let listener = listeners::create(&call.app, &call.actor, &call.tenant, &mut work, wanted).await?;
    work.commit(StatusCode::CREATED, &listener).await
}

async fn requests(
    call: Call,
    Path((_, id)): Path<(String, String)>,
    method: Method,
) -> Result<Response, Problem> {
    // HEAD is routed like GET and would consume and discard requests.
    if method != Method::GET {
        return Err(Problem::new(
            Kind::MethodNotAllowed,
            "Use GET to read a listener's requests.",
        ));
    }
    let session = listeners::open(&call.app, &call.tenant, &id).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/x-ndjson"),
        // Buffering proxies would hold everything back.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, session.body()).into_response())
}

async fn delete(call: Call, Path((_, id)): Path<(String, String)>) -> Result<StatusCode, Problem> {
    listeners::delete(&call.app, &call.tenant, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
