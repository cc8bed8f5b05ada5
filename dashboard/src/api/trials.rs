//! Test events and probes for an endpoint. `actions::trials` sends them; none of them becomes a delivery.

use axum::{
    Extension,
    extract::{FromRequestParts, Path},
    http::{StatusCode, request::Parts},
    response::Response,
};
use postrider_proto::api::{ProbeReport, TestAttempt, TestRequest};
use serde::Serialize;

use crate::{
    Shared,
    actions::trials::{self, Asked, Recorded},
    auth::{Actor, Rule::Own, Tenant},
    http::{
        cells::Here,
        idempotency::{Claim, Running, Work},
        input::OptionalBody,
        problem::Problem,
    },
    openapi::Operation,
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post(Own, "/v1/tenants/{tenant}/endpoints/{endpoint}/test", test)
            .named("testEndpoint", "Send a test event")
            .describe(
                "Sends one synthetic event now, with data generated from the type's schema and the header \
                 `Webhook-Test: true`. It is not recorded as a delivery. Limited to 20 per minute and endpoint. 409 \
                 while all sending is stopped or the tenant is paused.",
            )
            .may_accept::<TestRequest>()
            .returns::<TestAttempt>(200, "The attempt, successful or not, without the response body.")
            .fails_with(&[409, 429]),
        Operation::post(Own, "/v1/tenants/{tenant}/endpoints/{endpoint}/probe", probe)
            .named("probeEndpoint", "Probe an endpoint")
            .describe(
                "Tests the receiver's implementation with up to 35 valid and invalid test events within 16 seconds, and \
                 reports how to fix failed checks. Limited to 10 per ten minutes and endpoint. 409 while all sending is \
                 stopped or the tenant is paused.",
            )
            .may_accept::<TestRequest>()
            .returns::<ProbeReport>(200, "The result of each check, with a score.")
            .fails_with(&[409, 429]),
    ]
}

async fn test(
    Here { app, .. }: Here,
    asked: Asked,
    claim: Claim,
    OptionalBody(form): OptionalBody<TestRequest>,
) -> Result<Response, Problem> {
    let trial = trials::test(&app, &asked, form.r#type.as_deref());
    run(&app, claim, &asked, trial).await
}

async fn probe(
    Here { app, .. }: Here,
    asked: Asked,
    claim: Claim,
    OptionalBody(form): OptionalBody<TestRequest>,
) -> Result<Response, Problem> {
    let trial = trials::probe(&app, &asked, form.r#type.as_deref());
    run(&app, claim, &asked, trial).await
}

impl FromRequestParts<Shared> for Asked {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Response> {
        type Given = (Extension<Actor>, Extension<Tenant>, Path<(String, String)>);
        let given = Given::from_request_parts(parts, app).await;
        let (Extension(actor), Extension(tenant), Path((_, endpoint))) = given?;
        Ok(Self {
            actor,
            tenant,
            endpoint,
        })
    }
}

/// Holds the `Idempotency-Key` while it runs.
async fn run<T: Serialize + Recorded>(
    app: &Shared,
    claim: Claim,
    asked: &Asked,
    trial: impl Future<Output = Result<T, Problem>>,
) -> Result<Response, Problem> {
    let running = Running::begin(app, &claim).await?;
    let answered = match trial.await {
        Ok(result) => respond(app, claim, asked, &result).await,
        Err(problem) => Err(problem),
    };
    running.end().await;
    answered
}

async fn respond<T: Serialize + Recorded>(
    app: &Shared,
    claim: Claim,
    asked: &Asked,
    result: &T,
) -> Result<Response, Problem> {
    let mut work = Work::begin(app, claim).await?;
    trials::record(&mut work, asked, result).await?;
    work.commit(StatusCode::OK, result).await
}
