//! The results of the search box, as a page and as the list below the box while someone types.

use askama::Template;
use askama_web::WebTemplate;
use axum::response::{Html, IntoResponse, Redirect, Response};
use postrider_proto::EndpointState;
use serde::Deserialize;

use super::{DeliverySummary, Frame, Markup, Paged, When};
use crate::{
    Pool,
    actions::search::{self, Found, HITS_MAX, TEXT_BYTES_MAX},
    auth::Visit,
    http::{
        input::Query,
        problem::{Kind, Problem},
    },
    pages::stats_format::counted,
    tables::{endpoints::ListedRow, events::Effort, search::TenantHit},
};

#[derive(Default, Clone, Deserialize)]
#[serde(default)]
pub(crate) struct SearchQuery {
    q: String,
}

#[derive(Template, WebTemplate)]
#[template(path = "search.html")]
pub(crate) struct SearchPage {
    frame: Frame,
    text: String,
    results: Markup,
    is_empty: bool,
    error: Option<String>,
}

/// Grouped results, a part of the page and of the list below the box.
#[derive(Template)]
#[template(path = "search_results.html")]
struct Results {
    is_team: bool,
    found: Found,
    delivery: Option<DeliverySummary>,
}

impl Results {
    fn of(found: Found, is_team: bool) -> Self {
        let delivery = found.delivery.as_ref().map(DeliverySummary::from);
        Self {
            is_team,
            found,
            delivery,
        }
    }

    fn summary(&self) -> String {
        match self.found.count() {
            0 if self.found.is_waiting_for_enter => {
                "Press Enter to look for an event with this ID in all tenants".to_owned()
            }
            0 => "No results".to_owned(),
            count => counted(count, "result", "results"),
        }
    }
}

/// What a result says of an endpoint. That it is active says little: it may be failing, which a search does not look up.
pub(crate) fn about(row: &ListedRow, is_team: &bool) -> String {
    let state = Some(row.state.as_str()).filter(|_| row.state != EndpointState::Active);
    let tenant = Some(row.tenant.as_str()).filter(|_| *is_team);
    let parts = [state, tenant, row.description.as_deref()];
    parts.into_iter().flatten().collect::<Vec<&str>>().join(" · ")
}

pub(crate) async fn show(visit: Visit, Query(query): Query<SearchQuery>) -> Paged<Response> {
    let is_team = visit.session.tenant.is_none();
    let scope = visit.session.scope();
    let mut silent = Vec::new();
    let found = match search::find_everywhere(&visit.app, scope, &query.q, Effort::Full).await {
        Ok((found, missing)) => {
            silent = missing;
            Ok(found)
        }
        Err(problem) if problem.kind == Kind::Invalid => Err(problem),
        Err(problem) => return Err(problem.into()),
    };
    let error = found.as_ref().err().map(|_| error_text());
    let status = found.as_ref().err().map(Problem::status).unwrap_or_default();
    let found = found.unwrap_or_default();
    if let Some(page) = found.exact.as_ref().filter(|_| silent.is_empty()) {
        return Ok(Redirect::to(page).into_response());
    }
    let page = SearchPage {
        frame: Frame::new(visit.session, "search").without(&silent),
        text: query.q.trim().to_owned(),
        is_empty: found.count() == 0,
        results: Markup::of(&Results::of(found, is_team))?,
        error,
    };
    Ok((status, page).into_response())
}

fn error_text() -> String {
    format!("The search text must be plain text of at most {TEXT_BYTES_MAX} bytes.")
}

/// The results only. The script inserts them below the box.
pub(crate) async fn suggest(visit: Visit, Query(query): Query<SearchQuery>) -> Result<Response, Problem> {
    let is_team = visit.session.tenant.is_none();
    let scope = visit.session.scope();
    let (found, _) = search::find_everywhere(&visit.app, scope, &query.q, Effort::Typing).await?;
    let results = Markup::of(&Results::of(found, is_team))?;
    Ok(Html(results.0).into_response())
}

/// Options of the inputs that ask for a tenant.
#[derive(Template)]
#[template(
    ext = "html",
    source = r#"{% for row in rows %}<option value="{{ row.slug }}">{% if let Some(name) = row.name %}{{ name }}{% endif %}</option>{% endfor %}"#
)]
struct Options {
    rows: Vec<TenantHit>,
}

pub(crate) async fn tenants(visit: Visit, Query(query): Query<SearchQuery>) -> Result<Response, Problem> {
    let rows = search::suggest_tenants(&visit.app.pool, &query.q).await?;
    Ok(Html(Markup::of(&Options { rows })?.0).into_response())
}

/// Tenants like the one that was asked for in vain, as links to the same list.
#[derive(Template)]
#[template(
    ext = "html",
    source = r#"{% if !rows.is_empty() %}<p>Similar tenants:{% for row in rows %} <a href="{{ path }}?tenant={{ row.slug|urlencode_strict }}">{{ row.slug }}</a>{% if !loop.last %},{% endif %}{% endfor %}</p>{% endif %}"#
)]
struct Similar {
    path: &'static str,
    rows: Vec<TenantHit>,
}

/// For the lists of the team. A text that can't be searched for is like nothing.
pub(super) async fn similar_tenants(pool: &Pool, path: &'static str, text: &str) -> Result<Markup, Problem> {
    match search::suggest_tenants(pool, text).await {
        Ok(rows) => Markup::of(&Similar { path, rows }),
        Err(problem) if problem.kind == Kind::Invalid => Ok(Markup::empty()),
        Err(problem) => Err(problem),
    }
}
