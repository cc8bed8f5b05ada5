//! The health of endpoints across tenants: which ones fail, for operators and their tools.

use std::cmp::Reverse;

use axum::extract::State;
use postrider_proto::{
    EndpointId,
    api::{EndpointStatus, shapes},
    state::{CircuitState, HealthStatus},
};
use serde::Deserialize;
use serde_json::json;

use super::Partial;
use crate::{
    Shared,
    actions::endpoints::health,
    auth::Rule::Admin,
    http::{
        cells::{Here, Purpose, ask, merge},
        input::Query,
        pagination::{self, Page},
        problem::Problem,
    },
    openapi::{Operation, schema_of},
    tables::{endpoint_health::HealthFilter, tenants},
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Admin, "/v1/endpoints", list)
            .named("listEndpointHealth", "List endpoints of all tenants with their health")
            .describe(
                "For example `?health=failing` for endpoints without a success since their latest failure, or \
                 `?sort=failures` for those with the most failed attempts in the last hour. If few endpoints match, a page \
                 may be short or even empty and still have a `next_cursor`.",
            )
            .query(
                "health",
                schema_of(shapes::health_status()),
                "Only endpoints with this status.",
            )
            .query(
                "circuit",
                schema_of(shapes::circuit_state()),
                "Only endpoints whose circuit breaker is in this state.",
            )
            .query("tenant", schema_of(shapes::label()), "Only endpoints of this tenant.")
            .query(
                "sort",
                json!({"type": "string", "enum": ["created", "failures"], "default": "created"}),
                "`failures`: most failed attempts in the last hour first; one page, without a cursor.",
            )
            .returns_page::<EndpointStatus>("A page of endpoints, in order of creation unless sorted otherwise."),
    ]
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct HealthQuery {
    limit: Option<String>,
    cursor: Option<String>,
    health: Option<String>,
    circuit: Option<String>,
    tenant: Option<String>,
    sort: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    Created,
    Failures,
}

async fn list(
    State(app): State<Shared>,
    Query(query): Query<HealthQuery>,
) -> Result<Partial<Page<EndpointStatus>>, Problem> {
    let limit = pagination::limit(query.limit.as_deref())?;
    let after: Option<i32> = pagination::after(query.cursor.as_deref())?;
    let sort = parse_sort(query.sort.as_deref())?;
    let mut filter = HealthFilter {
        tenant: None,
        health: parse(
            "health",
            query.health.as_deref(),
            HealthStatus::ALL,
            HealthStatus::as_str,
        )?,
        circuit: parse(
            "circuit",
            query.circuit.as_deref(),
            CircuitState::ALL,
            CircuitState::as_str,
        )?,
    };
    if let Some(slug) = &query.tenant {
        // Nothing matches a tenant that does not exist.
        let Some(tenant) = tenants::find(&app.pool, slug).await? else {
            return Ok(Partial::whole(page(Vec::new(), None)));
        };
        filter.tenant = Some(tenant.id);
    }
    let app = match &query.tenant {
        Some(slug) => Here::of_tenant(&app, slug, Purpose::Read).await?.app,
        None => app,
    };
    if sort == Sort::Failures {
        if after.is_some() {
            let detail =
                "Query parameter `cursor` can't be combined with `sort=failures`, which has one page.";
            return Err(Problem::bad_request(detail));
        }
        let answers = ask(&app, move |app| async move {
            health::top_failing(&app.pool, &filter, limit).await
        })
        .await?;
        let silent = answers.silent.clone();
        let mut found: Vec<EndpointStatus> = answers.parts().into_iter().flatten().collect();
        found.sort_by_key(|one| Reverse(one.last_hour.failed));
        found.truncate(limit as usize);
        return Ok(Partial::without(page(found, None), &silent));
    }
    let after = EndpointId(after.unwrap_or_default());
    let answers = ask(&app, move |app| async move {
        let (found, next) = health::list(&app.pool, &filter, after, limit).await?;
        Ok((found, next.map(Reverse)))
    })
    .await?;
    let silent = answers.silent.clone();
    let (found, next) = merge(answers.parts(), limit, |(number, _)| Reverse(*number));
    let found = found.into_iter().map(|(_, one)| one).collect();
    Ok(Partial::without(page(found, next.map(|Reverse(id)| id)), &silent))
}

fn page(data: Vec<EndpointStatus>, next: Option<EndpointId>) -> Page<EndpointStatus> {
    Page {
        data,
        next_cursor: next.map(|id| pagination::encode(&id.0)),
    }
}

fn parse<T: Copy>(
    name: &str,
    text: Option<&str>,
    all: &[T],
    word: fn(T) -> &'static str,
) -> Result<Option<T>, Problem> {
    let Some(text) = text else { return Ok(None) };
    let found = all.iter().copied().find(|one| word(*one) == text);
    let allowed = || all.iter().map(|one| word(*one)).collect::<Vec<_>>().join(", ");
    let invalid = || Problem::bad_request(format!("Query parameter `{name}` must be one of: {}.", allowed()));
    found.map(Some).ok_or_else(invalid)
}

fn parse_sort(text: Option<&str>) -> Result<Sort, Problem> {
    match text {
        None | Some("created") => Ok(Sort::Created),
        Some("failures") => Ok(Sort::Failures),
        Some(_) => Err(Problem::bad_request(
            "Query parameter `sort` must be one of: created, failures.",
        )),
    }
}
