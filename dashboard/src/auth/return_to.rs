//! The way back after signing in. A page that was asked for without a session is opened afterwards; a form is not sent
//! again, and the sign-in page says so.
//! Invariant: the way back leads to a page of this site, whatever the address says.

use axum::extract::Request;
use url::form_urlencoded::Serializer;

use super::session::has_cookie;

/// A longer address is not kept.
const NEXT_BYTES_MAX: usize = 2_000;

/// Why somebody has to sign in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The session ended or was ended elsewhere.
    Expired,
    /// The same, and a form was submitted that had no effect.
    NotDone,
    SignedOut,
    SignedOutEverywhere,
    PasswordChanged,
}

impl Reason {
    const ALL: [Self; 5] = [
        Self::Expired,
        Self::NotDone,
        Self::SignedOut,
        Self::SignedOutEverywhere,
        Self::PasswordChanged,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::NotDone => "not-done",
            Self::SignedOut => "signed-out",
            Self::SignedOutEverywhere => "signed-out-everywhere",
            Self::PasswordChanged => "password-changed",
        }
    }

    pub(crate) fn read(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == text)
    }

    pub(crate) fn sign_in_address(self) -> String {
        format!("/sign-in?reason={}", self.as_str())
    }

    pub(crate) const fn message(self) -> &'static str {
        match self {
            Self::Expired => "Your session has ended. Sign in to continue.",
            Self::NotDone => {
                "Your session has ended, so your last action was not carried out. Sign in and repeat it."
            }
            Self::SignedOut => "You are signed out.",
            Self::SignedOutEverywhere => "You are signed out everywhere: all of your sessions have ended.",
            Self::PasswordChanged => {
                "Your password was changed and all of your sessions have ended. Sign in with the new password."
            }
        }
    }

    /// Whether it confirms what the person asked for.
    pub(crate) const fn is_good(self) -> bool {
        matches!(
            self,
            Self::SignedOut | Self::SignedOutEverywhere | Self::PasswordChanged
        )
    }
}

/// Where to sign in for this request, with the way back.
pub(super) fn sign_in_address(request: &Request) -> String {
    let had_session = has_cookie(request.headers());
    let reason = match request.method().is_safe() {
        true => had_session.then_some(Reason::Expired),
        false => Some(Reason::NotDone),
    };
    let mut query = Serializer::new(String::new());
    if let Some(reason) = reason {
        query.append_pair("reason", reason.as_str());
    }
    let asked = request.uri().path_and_query().map_or("/", |path| path.as_str());
    if request.method().is_safe() && asked != "/" && !asked.starts_with("/live/") && is_local(asked) {
        query.append_pair("next", asked);
    }
    match query.finish() {
        query if query.is_empty() => "/sign-in".to_owned(),
        query => format!("/sign-in?{query}"),
    }
}

/// A path on this site. `//host` and `/\\host` would lead to another one.
pub(crate) fn is_local(path: &str) -> bool {
    let is_plain = path.bytes().all(|b| b.is_ascii_graphic());
    let is_path = path.starts_with('/') && !path[1..].starts_with(['/', '\\']);
    is_path && is_plain && path.len() <= NEXT_BYTES_MAX && !path.contains('\\')
}

#[cfg(test)]
mod tests {
    use axum::{
        body::Body,
        http::{Method, header},
    };

    use super::*;

    #[test]
    fn only_pages_of_this_site_are_a_way_back() {
        for good in [
            "/",
            "/deliveries?state=dead&tenant=acme",
            "/endpoints/ep_1/settings",
        ] {
            assert!(is_local(good), "{good}");
        }
        let long = format!("/{}", "a".repeat(NEXT_BYTES_MAX));
        for bad in [
            "",
            "https://evil.example",
            "//evil.example",
            "/\\evil.example",
            "/a\\b",
            "/\tevil",
            "evil",
            "/ü",
            long.as_str(),
        ] {
            assert!(!is_local(bad), "{bad}");
        }
    }

    #[test]
    fn a_page_is_remembered_and_a_form_is_not() {
        let asked = |method: Method, path: &str, cookie: &str| {
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header(header::COOKIE, cookie)
                .body(Body::empty())
                .expect("a request");
            sign_in_address(&request)
        };
        let page = "/deliveries?state=dead";
        assert_eq!(
            asked(Method::GET, page, ""),
            "/sign-in?next=%2Fdeliveries%3Fstate%3Ddead"
        );
        assert_eq!(
            asked(Method::GET, page, "postrider_session=x"),
            "/sign-in?reason=expired&next=%2Fdeliveries%3Fstate%3Ddead"
        );
        assert_eq!(asked(Method::GET, "/", ""), "/sign-in");
        assert_eq!(asked(Method::GET, "/live/overview", ""), "/sign-in");
        assert_eq!(
            asked(Method::POST, "/endpoints/ep_1/pause", "postrider_session=x"),
            "/sign-in?reason=not-done"
        );
    }
}
