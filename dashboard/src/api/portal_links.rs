//! Portal links: let customers into the pages of their own tenant.

use axum::{Extension, extract::State, http::StatusCode, response::Response};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Shared,
    auth::{Actor, Tenant, portal},
    http::{
        idempotency::{Claim, Work},
        input::OptionalBody,
        problem::Problem,
    },
    tables::tenants,
};

/// No options yet; unknown fields are rejected.
#[derive(Default, Deserialize, ToSchema)]
#[schema(as = NewPortalLink)]
#[serde(deny_unknown_fields)]
pub(crate) struct LinkForm {}

#[derive(Serialize, ToSchema)]
#[schema(as = PortalLink)]
pub(crate) struct LinkView {
    url: String,
    expires_at: DateTime<Utc>,
}

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    claim: Claim,
    OptionalBody(LinkForm {}): OptionalBody<LinkForm>,
) -> Result<Response, Problem> {
    let mut work = Work::begin(&app, claim).await?;
    if !tenants::lock(&mut *work, tenant.id).await? {
        return Err(Problem::not_found("tenant"));
    }
    let link = portal::make(&app, &mut work, &actor, &tenant).await?;
    let view = LinkView {
        url: link.url,
        expires_at: link.expires_at,
    };
    work.commit(StatusCode::CREATED, &view).await
}
