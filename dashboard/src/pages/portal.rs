//! The entrance of the customer portal. A portal link is exchanged for a session, and the redirect removes its token from
//! the address.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::State,
    http::{HeaderMap, Method, StatusCode},
    response::{IntoResponse, Redirect, Response},
};
use serde::Deserialize;

use super::{Paged, sign_in::set_cookie};
use crate::{
    Shared,
    auth::{ClientAddress, portal, session_cookie},
    http::input::Query,
};

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct EnterQuery {
    token: String,
}

#[derive(Template, WebTemplate)]
#[template(path = "portal_over.html")]
struct OverPage;

pub(crate) async fn enter(
    State(app): State<Shared>,
    Extension(ClientAddress(address)): Extension<ClientAddress>,
    method: Method,
    headers: HeaderMap,
    Query(query): Query<EnterQuery>,
) -> Paged<Response> {
    // A mail client or browser that prefetches the link must not use it up.
    if method == Method::HEAD || is_prefetch(&headers) {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    Ok(match portal::redeem(&app, &query.token, address).await? {
        Some(token) => {
            let set = session_cookie(&token, &app.public_url);
            (set_cookie(&set), Redirect::to("/")).into_response()
        }
        None if portal::is_open(&app, &query.token, &headers).await? => Redirect::to("/").into_response(),
        None => (StatusCode::GONE, OverPage).into_response(),
    })
}

fn is_prefetch(headers: &HeaderMap) -> bool {
    ["sec-purpose", "purpose", "x-moz", "x-purpose"]
        .iter()
        .filter_map(|name| headers.get(*name)?.to_str().ok())
        .any(|value| value.contains("prefetch") || value.contains("prerender") || value.contains("preview"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefetches_are_recognised() {
        let with = |name: &'static str, value: &str| {
            HeaderMap::from_iter([(
                axum::http::HeaderName::from_static(name),
                value.parse().expect("a value"),
            )])
        };
        assert!(is_prefetch(&with("sec-purpose", "prefetch;prerender")));
        assert!(is_prefetch(&with("x-moz", "prefetch")));
        assert!(!is_prefetch(&with("sec-fetch-dest", "document")));
    }
}
