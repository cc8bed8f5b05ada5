//! The way in for customers: a link is exchanged for a session, and is gone from the address with the redirect.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::State,
    http::{HeaderMap, Method, StatusCode},
    response::{IntoResponse, Redirect, Response},
};
use serde::Deserialize;

use super::{PageProblem, sign_in::set_cookie};
use crate::{
    Shared,
    auth::{ClientAddress, portal, session_cookie},
    input::Query,
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
) -> Result<Response, PageProblem> {
    // A mail program or a browser that looks ahead must not use the link up before the customer does.
    if method == Method::HEAD || is_look_ahead(&headers) {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    Ok(match portal::redeem(&app, &query.token, address).await? {
        Some(token) => {
            let set = session_cookie(&token, &app.public_url);
            (set_cookie(&set), Redirect::to("/")).into_response()
        }
        None => (StatusCode::GONE, OverPage).into_response(),
    })
}

fn is_look_ahead(headers: &HeaderMap) -> bool {
    ["sec-purpose", "purpose", "x-moz", "x-purpose"]
        .iter()
        .filter_map(|name| headers.get(*name)?.to_str().ok())
        .any(|value| value.contains("prefetch") || value.contains("prerender") || value.contains("preview"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_ahead_is_told_from_coming_in() {
        let with = |name: &'static str, value: &str| {
            HeaderMap::from_iter([(
                axum::http::HeaderName::from_static(name),
                value.parse().expect("a value"),
            )])
        };
        assert!(is_look_ahead(&with("sec-purpose", "prefetch;prerender")));
        assert!(is_look_ahead(&with("x-moz", "prefetch")));
        assert!(!is_look_ahead(&with("sec-fetch-dest", "document")));
    }
}
