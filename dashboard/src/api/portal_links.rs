//! Portal links: let customers into the pages of their own tenant.

use axum::{Extension, extract::State, http::StatusCode, response::Response};
use postrider_proto::api::{NewPortalLink, PortalLink};

use crate::{
    Shared,
    auth::{Actor, Rule::Own, Tenant, portal},
    http::{
        idempotency::{Claim, Work},
        input::OptionalBody,
        problem::Problem,
    },
    openapi::Operation,
    tables::tenants,
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post(Own, "/v1/tenants/{tenant}/portal-links", create)
            .named("createPortalLink", "Create a portal link")
            .describe("Lets a customer into the pages of their own tenant. The link can be used once, within 15 minutes.")
            .returns::<PortalLink>(201, "The link. It is returned only once."),
    ]
}

async fn create(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    claim: Claim,
    OptionalBody(NewPortalLink {}): OptionalBody<NewPortalLink>,
) -> Result<Response, Problem> {
    let mut work = Work::begin(&app, claim).await?;
    if !tenants::lock(&mut *work, tenant.id).await? {
        return Err(Problem::not_found("tenant"));
    }
    let link = portal::make(&app, &mut work, &actor, &tenant).await?;
    let view = PortalLink {
        url: link.url,
        expires_at: link.expires_at,
    };
    work.commit(StatusCode::CREATED, &view).await
}
