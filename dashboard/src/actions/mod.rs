//! What the product does, called by the API, the pages and gRPC alike: typed input, typed results, no HTTP responses.

pub(crate) mod alerts;
pub(crate) mod api_keys;
pub(crate) mod attempt_view;
pub(crate) mod audit_log;
pub(crate) mod compatibility;
pub(crate) mod delivery_filter;
mod delivery_view;
pub(crate) mod discards;
pub(crate) mod emits;
pub(crate) mod endpoints;
pub(crate) mod event_routing;
pub(crate) mod event_type_drafts;
pub(crate) mod event_types;
pub(crate) mod export;
pub(crate) mod failures;
pub(crate) mod form_results;
pub(crate) mod listeners;
pub(crate) mod listening;
pub(crate) mod numbers;
pub(crate) mod people;
pub(crate) mod replay;
pub(crate) mod replays;
pub(crate) mod search;
pub(crate) mod secrets;
pub(crate) mod tenants;
pub(crate) mod trials;
