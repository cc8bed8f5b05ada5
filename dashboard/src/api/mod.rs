//! The HTTP API, one file per noun. Handlers parse, call `actions` or read `tables`, and respond.

pub(crate) mod alerts;
pub(crate) mod api_keys;
pub(crate) mod audit;
pub(crate) mod batch;
pub(crate) mod catalogue;
pub(crate) mod dead_letters;
pub(crate) mod deliveries;
pub(crate) mod endpoints;
pub(crate) mod erasures;
pub(crate) mod event_types;
pub(crate) mod events;
pub(crate) mod health;
pub(crate) mod listeners;
pub(crate) mod portal_links;
pub(crate) mod replays;
pub(crate) mod rotations;
pub(crate) mod secrets;
pub(crate) mod tenants;
pub(crate) mod trials;

use axum::Json;

use crate::http::problem::Problem;

type Answer<T> = Result<Json<T>, Problem>;
