//! All deliveries, the newest first. The filters live in the address.

use askama::Template;
use askama_web::WebTemplate;
use axum::{Extension, extract::State};
use serde::Deserialize;

use super::{Frame, Line, PageProblem};
use crate::{
    Shared,
    api::deliveries::parse_state,
    auth::Session,
    deliveries::{self, Filter},
    input::Query,
    listing,
    tables::tenants,
};

const LINES: i64 = 50;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct DeliveriesQuery {
    tenant: String,
    state: String,
    cursor: Option<String>,
}

#[derive(Template, WebTemplate)]
#[template(path = "deliveries.html")]
pub(crate) struct DeliveriesPage {
    frame: Frame,
    tenant: String,
    state: String,
    no_such_tenant: bool,
    lines: Vec<Line>,
    next: Option<String>,
}

pub(crate) async fn show(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Query(query): Query<DeliveriesQuery>,
) -> Result<DeliveriesPage, PageProblem> {
    let state = match query.state.as_str() {
        "" => None,
        word => Some(parse_state(word)?),
    };
    let after = query.cursor.as_deref().map(listing::decode).transpose()?;
    let tenant = match query.tenant.as_str() {
        "" => None,
        slug => tenants::find(&app.pool, slug).await?,
    };
    let no_such_tenant = tenant.is_none() && !query.tenant.is_empty();
    let (found, next) = if no_such_tenant {
        (Vec::new(), None)
    } else {
        let filter = Filter {
            tenant: session.scope().or(tenant.map(|row| row.id)),
            state,
            ..Filter::default()
        };
        deliveries::list(&app.pool, &filter, after, LINES).await?
    };
    Ok(DeliveriesPage {
        frame: Frame::new(session, "deliveries"),
        tenant: query.tenant,
        state: query.state,
        no_such_tenant,
        lines: found.iter().map(Line::from).collect(),
        next: next.map(|id| listing::encode(&id)),
    })
}
