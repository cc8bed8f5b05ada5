//! The HTTP API, one file per noun. `operations` of a file has its operations with their documentation; handlers parse,
//! call `actions` or read `tables`, and respond.

mod alerts;
mod api_keys;
mod audit;
mod batch;
mod catalogue;
mod cells;
mod dead_letters;
mod deliveries;
pub(crate) mod description;
mod endpoint_health;
mod endpoints;
mod erasures;
mod event_types;
pub(crate) mod events;
pub(crate) mod export;
pub(crate) mod health;
mod listeners;
mod log_filter;
mod moves;
mod portal_links;
mod quotas;
mod replays;
mod rotations;
mod secrets;
mod sending;
mod tenants;
mod trials;

use axum::{
    Json,
    http::{HeaderName, HeaderValue},
    response::{IntoResponse, Response},
};
use serde::Serialize;

use crate::{http::problem::Problem, openapi::Operation};

type ApiResult<T> = Result<Json<T>, Problem>;

/// Names the cells that are missing in a response.
const MISSING: HeaderName = HeaderName::from_static("postrider-missing-cells");

/// A response about all cells.
struct Partial<T> {
    body: T,
    silent: String,
}

impl<T> Partial<T> {
    fn whole(body: T) -> Self {
        Self::without(body, &[])
    }

    fn without(body: T, silent: &[String]) -> Self {
        Self {
            body,
            silent: silent.join(", "),
        }
    }
}

impl<T: Serialize> IntoResponse for Partial<T> {
    fn into_response(self) -> Response {
        let mut response = Json(self.body).into_response();
        // Names of cells are plain text.
        if let Ok(silent) = HeaderValue::from_str(&self.silent)
            && !silent.is_empty()
        {
            response.headers_mut().insert(MISSING, silent);
        }
        response
    }
}

/// Every operation of the API. The router and the OpenAPI document are made from these.
pub(crate) fn operations() -> impl Iterator<Item = Operation> {
    [
        ("System", health::operations()),
        ("System", description::operations()),
        ("Tenants", tenants::operations()),
        ("Tenants", quotas::operations()),
        ("Tenants", portal_links::operations()),
        ("Event types", event_types::operations()),
        ("Event types", catalogue::operations()),
        ("Events", events::operations()),
        ("Events", batch::operations()),
        ("Endpoints", endpoints::operations()),
        ("Endpoints", endpoint_health::operations()),
        ("Endpoints", secrets::operations()),
        ("Endpoints", rotations::operations()),
        ("Endpoints", trials::operations()),
        ("Endpoints", listeners::operations()),
        ("Endpoints", alerts::operations()),
        ("Deliveries", deliveries::operations()),
        ("Deliveries", dead_letters::operations()),
        ("Deliveries", replays::operations()),
        ("Administration", api_keys::operations()),
        ("Administration", erasures::operations()),
        ("Administration", moves::operations()),
        ("Administration", audit::operations()),
        ("Administration", sending::operations()),
        ("Administration", log_filter::operations()),
        ("Administration", cells::operations()),
    ]
    .into_iter()
    .flat_map(|(tag, operations)| operations.into_iter().map(move |one| one.in_group(tag)))
}
