//! Signing secrets: revealed to their owner, and rotated with an overlap in which both sign.

use axum::{Json, extract::Path, http::StatusCode, response::Response};
use postrider_proto::api::{EndpointSecret, Rotation, Secrets};

use super::ApiResult;
use crate::{
    actions::secrets::{self, Opened},
    auth::{Call, Rule::Own},
    http::{
        idempotency::{Claim, Work},
        input::OptionalBody,
        problem::Problem,
        wait_until_applied::settled,
    },
    openapi::Operation,
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(Own, "/v1/tenants/{tenant}/endpoints/{endpoint}/secret", reveal)
            .named("revealSecrets", "Reveal an endpoint's secrets")
            .describe("Returns the active secrets, newest first. The access is recorded in the audit log.")
            .returns::<Secrets>(200, "The active secrets; for key pairs, the public keys."),
        Operation::post(Own, "/v1/tenants/{tenant}/endpoints/{endpoint}/secret/rotate", rotate)
            .named("rotateSecret", "Rotate an endpoint's secret")
            .describe(
                "The new secret signs from now on; older secrets also sign until they retire. Endpoints that subscribe to \
                 `postrider.secret.rotating` are notified.",
            )
            .may_accept::<Rotation>()
            .returns::<Secrets>(200, "The active secrets, newest first."),
    ]
}

fn view(opened: Vec<Opened>) -> Secrets {
    let secret = |one: Opened| EndpointSecret {
        value: (&one.secret).into(),
        state: match one.retires_at {
            None => "current".to_owned(),
            Some(_) => "retiring".to_owned(),
        },
        created_at: one.created_at,
        retires_at: one.retires_at,
    };
    Secrets {
        data: opened.into_iter().map(secret).collect(),
    }
}

async fn reveal(call: Call, Path((_, id)): Path<(String, String)>) -> ApiResult<Secrets> {
    let opened = secrets::reveal(&call.app, &call.actor, &call.tenant, &id).await?;
    Ok(Json(view(opened)))
}

async fn rotate(
    call: Call,
    Path((_, id)): Path<(String, String)>,
    claim: Claim,
    OptionalBody(form): OptionalBody<Rotation>,
) -> Result<Response, Problem> {
    let rotation = secrets::Rotation::read(form.overlap_seconds, form.secret)?;
    let mut work = Work::begin(&call.app, claim).await?;
    let rotated = secrets::rotate(&call.app, &call.actor, &call.tenant, &id, &mut work, rotation).await?;
    let xid = work.settles(rotated.shard).await?;
    let response = work.commit(StatusCode::OK, &view(rotated.secrets)).await?;
    call.app.wake.now();
    settled(&call.app.pool, rotated.shard, &xid).await?;
    Ok(response)
}
