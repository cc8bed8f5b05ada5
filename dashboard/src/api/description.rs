//! The OpenAPI document of all operations.

use std::sync::LazyLock;

use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use postrider_proto::api::shapes;
use serde_json::Value;

use crate::{
    auth::Rule::Open,
    openapi::{Operation, compose, schema_of},
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(Open, "/openapi.json", show)
            .named("getOpenapi", "OpenAPI document")
            .returns_json(200, schema_of(shapes::object()), "This document, OpenAPI 3.1."),
    ]
}

/// As served, and as stored in `docs/openapi.json`.
pub fn document() -> &'static str {
    static TEXT: LazyLock<String> =
        LazyLock::new(|| serde_json::to_string_pretty(value()).unwrap_or_default() + "\n");
    &TEXT
}

pub(crate) fn value() -> &'static Value {
    static VALUE: LazyLock<Value> = LazyLock::new(|| compose(super::operations()));
    &VALUE
}

async fn show() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/json"),
        (header::CACHE_CONTROL, "public, max-age=300"),
    ];
    (headers, document()).into_response()
}

#[cfg(test)]
mod tests;
