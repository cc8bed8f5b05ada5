//! Test events and probes for an endpoint. `actions::trials` sends them; none of them becomes a delivery.

use axum::{
    Extension,
    extract::{FromRequestParts, Path, State},
    http::{StatusCode, request::Parts},
    response::Response,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Shared,
    actions::trials::{self, Asked, Recorded},
    auth::{Actor, Tenant},
    http::{
        idempotency::{Claim, Running, Work},
        input::OptionalBody,
        problem::Problem,
        shapes,
    },
};

#[derive(Default, Deserialize, ToSchema)]
#[schema(as = TestRequest)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrialForm {
    #[schema(schema_with = shapes::type_or_null)]
    r#type: Option<String>,
}

pub(crate) async fn test(
    State(app): State<Shared>,
    asked: Asked,
    claim: Claim,
    OptionalBody(form): OptionalBody<TrialForm>,
) -> Result<Response, Problem> {
    let trial = trials::test(&app, &asked, form.r#type.as_deref());
    run(&app, claim, &asked, trial).await
}

pub(crate) async fn probe(
    State(app): State<Shared>,
    asked: Asked,
    claim: Claim,
    OptionalBody(form): OptionalBody<TrialForm>,
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
        Ok(result) => answer(app, claim, asked, &result).await,
        Err(problem) => Err(problem),
    };
    running.end().await;
    answered
}

async fn answer<T: Serialize + Recorded>(
    app: &Shared,
    claim: Claim,
    asked: &Asked,
    result: &T,
) -> Result<Response, Problem> {
    let mut work = Work::begin(app, claim).await?;
    trials::record(&mut work, asked, result).await?;
    work.commit(StatusCode::OK, result).await
}
