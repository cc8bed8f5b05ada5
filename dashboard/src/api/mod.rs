//! The HTTP API, one file per noun. `operations` of a file has its operations with their documentation; handlers parse,
//! call `actions` or read `tables`, and respond.

mod alerts;
mod api_keys;
mod audit;
mod batch;
mod catalogue;
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
mod portal_links;
mod quotas;
mod replays;
mod rotations;
mod secrets;
mod sending;
mod tenants;
mod trials;

use axum::Json;

use crate::{http::problem::Problem, openapi::Operation};

type ApiResult<T> = Result<Json<T>, Problem>;

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
        ("Administration", audit::operations()),
        ("Administration", sending::operations()),
        ("Administration", log_filter::operations()),
    ]
    .into_iter()
    .flat_map(|(tag, operations)| operations.into_iter().map(move |one| one.in_group(tag)))
}
