//! Every page with its access rule, and the router of the pages and of the operations in `api/`. No route can be added
//! without a rule. Next on a request's path: `auth::check`.

use axum::{
    Extension, Router,
    extract::Request,
    handler::Handler,
    http::{Extensions, HeaderMap, HeaderName, HeaderValue, StatusCode, Version, header},
    middleware::{from_fn_with_state, map_response},
    response::{IntoResponse, Response},
    routing::{MethodFilter, MethodRouter, on},
};
use tower_http::{
    CompressionLevel,
    catch_panic::CatchPanicLayer,
    compression::{CompressionLayer, Predicate, predicate::SizeAbove},
    trace::TraceLayer,
};

use crate::{
    Shared, api,
    auth::{self, Counts, Gate, Rule, place::Place},
    http::{
        idempotency, metrics,
        problem::{Kind, Problem},
    },
    openapi::Operation,
    pages::{self, live::Live},
};

/// Media types that are compressed. Forms have a token that differs on each page, so that lengths reveal nothing of it.
const COMPRESSED: [&str; 5] = [
    "text/html",
    "text/css",
    "text/javascript",
    "image/svg+xml",
    "application/json",
];
const COMPRESSED_BYTES_MIN: u16 = 1_024;
/// Fast, and within a few percent of the best.
const COMPRESSION_LEVEL: i32 = 4;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    pub method: &'static str,
    pub path: &'static str,
    pub rule: Rule,
}

struct Routes {
    app: Shared,
    /// Only routes that may be served from a replica.
    reads_only: bool,
    router: Router<Shared>,
    list: Vec<Route>,
}

/// With `reading`, only the routes that may be served from a replica, using its app. Access is checked with `app`.
pub(crate) fn build(app: Shared, reading: Option<Shared>, live: Live) -> (Router, Vec<Route>) {
    let routes = Routes {
        app: app.clone(),
        reads_only: reading.is_some(),
        router: Router::new(),
        list: Vec::new(),
    };
    let routes = api::operations().fold(routes, Routes::operation).pages();
    let router = routes
        .router
        .method_not_allowed_fallback(async || {
            Problem::new(
                Kind::MethodNotAllowed,
                "See /openapi.json for the methods of this path.",
            )
        })
        .fallback(async || Problem::not_found("path"))
        .layer(Extension(live))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(app.clone(), pages::problem::render))
        .layer(map_response(secure))
        .layer(compression())
        // Errors are logged where they happen, with their cause.
        .layer(TraceLayer::new_for_http().make_span_with(span).on_failure(()))
        .with_state(reading.unwrap_or(app));
    (router, routes.list)
}

impl Routes {
    fn pages(self) -> Self {
        self.ways_in().pages_of_tenants().pages_of_team()
    }

    /// Signing in and out, and what needs no session.
    #[rustfmt::skip]
    fn ways_in(self) -> Self {
        use Rule::{Open, Session};
        self
            .get("/docs", Open, pages::docs::show)
            .get("/assets/docs.css", Open, pages::assets::docs_style)
            .get("/assets/style.css", Open, pages::assets::style)
            .get("/assets/app.js", Open, pages::assets::script)
            .get("/assets/mark.svg", Open, pages::assets::mark)
            .get("/favicon.ico", Open, pages::assets::mark)
            .get("/assets/inter.woff2", Open, pages::assets::font)
            .get("/sign-in", Open, pages::sign_in::show)
            .post("/sign-in", Open, pages::sign_in::submit)
            .post("/sign-out", Session, pages::sign_in::leave)
            .post("/sign-out-everywhere", Session, pages::sign_in::leave_everywhere)
            .get("/portal", Open, pages::portal::enter)
    }

    /// For customers, too: each sees their own tenant.
    #[rustfmt::skip]
    fn pages_of_tenants(self) -> Self {
        use Rule::{Account, Administer, Ask, Manage, Operate, See, SignedIn};
        self
            .get("/", See, pages::overview::show)
            .get("/live/overview", See, pages::overview::follow)
            .read("/deliveries", See, pages::deliveries::show)
            .read("/deliveries/export", See, pages::deliveries::export)
            .get("/live/deliveries", See, pages::deliveries::follow)
            .read("/deliveries/{delivery}", See, pages::delivery::show)
            .post("/deliveries/{delivery}/replay", Operate, pages::delivery::replay)
            .post("/deliveries/{delivery}/discard", Operate, pages::delivery::discard)
            .get("/live/deliveries/{delivery}", See, pages::delivery::follow)
            .read("/events", See, pages::events::show)
            .read("/events/{event}", See, pages::event::show)
            .read("/events/{event}/body", See, pages::event::body)
            .read("/search", See, pages::search::show)
            .read("/search/tenants", SignedIn, pages::search::tenants)
            .read("/search/suggestions", See, pages::search::suggest)
            .read("/endpoints", See, pages::endpoints::show)
            .post("/endpoints", Manage, pages::endpoint_settings::create)
            .get("/endpoints/new", Manage, pages::endpoint_settings::blank)
            .read("/endpoints/rotations", See, pages::endpoints::rotations)
            .read("/endpoints/{endpoint}", See, pages::endpoint::show)
            .get("/live/endpoints/{endpoint}", See, pages::endpoint::follow)
            .post("/endpoints/{endpoint}/pause", Operate, pages::endpoint_actions::pause)
            .post("/endpoints/{endpoint}/resume", Operate, pages::endpoint_actions::resume)
            .post("/endpoints/{endpoint}/test", Operate, pages::endpoint_actions::test)
            .post("/endpoints/{endpoint}/probe", Operate, pages::endpoint_actions::probe)
            .get("/endpoints/{endpoint}/settings", See, pages::endpoint_settings::show)
            .post("/endpoints/{endpoint}/settings", Manage, pages::endpoint_settings::save)
            .post("/endpoints/{endpoint}/alert", Manage, pages::endpoint_alert::save)
            .post("/endpoints/{endpoint}/delete", Manage, pages::endpoint_settings::delete)
            .get("/endpoints/{endpoint}/secrets", See, pages::endpoint_secrets::show)
            .post("/endpoints/{endpoint}/secrets/reveal", Manage, pages::endpoint_secrets::reveal)
            .post("/endpoints/{endpoint}/secrets/rotate", Manage, pages::endpoint_secrets::rotate)
            .read("/dead-letters", See, pages::dead_letters::show)
            .get("/dead-letters/preview", Operate, pages::replay_preview::preview)
            .get("/dead-letters/discard", Operate, pages::discards::confirm)
            .post("/dead-letters/discard", Operate, pages::discards::submit)
            .read("/replays", See, pages::replays::list)
            .post("/replays", Operate, pages::replay_preview::start)
            .read("/replays/{replay}", See, pages::replays::show)
            .get("/live/replays/{replay}", See, pages::replays::follow)
            .post("/replays/{replay}/cancel", Operate, pages::replays::cancel)
            .post("/replays/{replay}/resume", Operate, pages::replays::resume)
            .post("/replays/{replay}/rate", Operate, pages::replays::set_rate)
            .get("/account", Account, pages::account::show)
            .post("/account/password", Account, pages::account::change_password)
            .read("/event-types", See, pages::event_types::list)
            .post("/event-types", Administer, pages::event_type_form::submit)
            .get("/event-types/new-type", Administer, pages::event_type_form::new_type)
            .read("/event-types/{type}", See, pages::event_types::show)
            .get("/event-types/{type}/new-version", Administer, pages::event_type_form::new_version)
            .post("/event-types/{type}/delete", Administer, pages::event_types::delete)
            .get("/verify", See, pages::verify::show)
            .get("/signatures", See, pages::signatures::show)
            .post("/signatures", Ask, pages::signatures::check)
    }

    /// For the people who run the installation.
    #[rustfmt::skip]
    fn pages_of_team(self) -> Self {
        use Rule::{Administer, SignedIn};
        self
            .read("/tenants", SignedIn, pages::tenants::list)
            .post("/tenants", Administer, pages::tenants::make)
            .read("/tenants/{slug}", SignedIn, pages::tenants::show)
            .post("/tenants/{slug}", Administer, pages::tenants::change)
            .post("/tenants/{slug}/delete", Administer, pages::tenants::delete)
            .post("/tenants/{slug}/pause", SignedIn, pages::tenants::pause)
            .post("/tenants/{slug}/resume", SignedIn, pages::tenants::resume)
            .post("/tenants/{slug}/quotas", Administer, pages::tenants::set_quotas)
            .post("/tenants/{slug}/portal-link", Administer, pages::tenants::make_link)
            .post("/tenants/{slug}/end-sessions", Administer, pages::tenants::end_sessions)
            .get("/api-keys", Administer, pages::api_keys::show)
            .post("/api-keys", Administer, pages::api_keys::create)
            .post("/api-keys/{key}/revoke", Administer, pages::api_keys::revoke)
            .read("/audit", SignedIn, pages::audit::show)
            .read("/audit/export", SignedIn, pages::audit::export)
            .get("/system", SignedIn, pages::system::show)
            .get("/cells", SignedIn, pages::cells::show)
            .post("/cells/moves", Administer, pages::cells::move_tenant)
            .post("/cells/moves/{move}/cancel", Administer, pages::cells::cancel_move)
            .post("/cells/{cell}/state", Administer, pages::cells::set_state)
            .post("/system/stop-sending", SignedIn, pages::system::stop_sending)
            .post("/system/resume-sending", SignedIn, pages::system::resume_sending)
            .get("/people", Administer, pages::people::show)
            .post("/people", Administer, pages::people::add)
            .post("/people/{login}/role", Administer, pages::people::set_role)
            .post("/people/{login}/password", Administer, pages::people::reset_password)
            .post("/people/{login}/remove", Administer, pages::people::remove)
    }

    fn get<H: Handler<T, Shared>, T: 'static>(self, path: &'static str, rule: Rule, handler: H) -> Self {
        match self.reads_only {
            true => self,
            false => self.read(path, rule, handler),
        }
    }

    /// A page that may be served from a replica.
    fn read<H: Handler<T, Shared>, T: 'static>(self, path: &'static str, rule: Rule, handler: H) -> Self {
        let method = "GET";
        let handler = on(MethodFilter::GET, handler);
        self.mount(Route { method, path, rule }, false, handler)
    }

    fn post<H: Handler<T, Shared>, T: 'static>(self, path: &'static str, rule: Rule, handler: H) -> Self {
        let method = "POST";
        match self.reads_only {
            true => self,
            false => self.mount(
                Route { method, path, rule },
                false,
                on(MethodFilter::POST, handler),
            ),
        }
    }

    fn operation(self, operation: Operation) -> Self {
        if self.reads_only && !operation.may_be_stale {
            return self;
        }
        let refuses_query = operation.path.starts_with("/v1/") && !operation.has_query();
        let Operation {
            method, path, rule, ..
        } = operation;
        self.mount(Route { method, path, rule }, refuses_query, operation.handler)
    }

    fn mount(mut self, route: Route, refuses_query: bool, mut served: MethodRouter<Shared>) -> Self {
        let Route { method, path, rule } = route;
        let gate = Gate {
            app: self.app.clone(),
            rule,
            place: Place::of(path, rule),
            counts: counts(path, rule),
            refuses_query,
        };
        if method == "POST" && path.starts_with("/v1/") {
            served = served.route_layer(from_fn_with_state(self.app.clone(), idempotency::keep));
        }
        let served = served
            .route_layer(from_fn_with_state(gate, auth::check))
            .route_layer(from_fn_with_state(counted(path, rule), metrics::measure));
        self.router = self.router.route(path, served);
        self.list.push(route);
        self
    }
}

/// The kind that the metrics count a route as.
fn counted(path: &str, rule: Rule) -> metrics::Kind {
    match rule {
        Rule::Emit => metrics::Kind::Emit,
        Rule::Open => metrics::Kind::Open,
        _ if path.starts_with("/v1/") => metrics::Kind::Api,
        _ => metrics::Kind::Page,
    }
}

fn counts(path: &str, rule: Rule) -> Counts {
    match rule {
        Rule::Open => Counts::Nowhere,
        Rule::Emit => Counts::Emit,
        _ if path.ends_with("/test") || path.ends_with("/probe") => Counts::Trial,
        _ => Counts::Request,
    }
}

/// Text of a size that is worth it. Streams of server-sent events must not be buffered.
fn compression() -> CompressionLayer<impl Predicate> {
    let is_text = |_: StatusCode, _: Version, headers: &HeaderMap, _: &Extensions| {
        let kind = headers
            .get(header::CONTENT_TYPE)
            .and_then(|value| value.to_str().ok());
        let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default();
        COMPRESSED.contains(&kind)
    };
    CompressionLayer::new()
        .quality(CompressionLevel::Precise(COMPRESSION_LEVEL))
        .compress_when(SizeAbove::new(COMPRESSED_BYTES_MIN).and(is_text))
}

/// Added to every response, so that no page can omit them.
async fn secure(mut response: Response) -> Response {
    const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; \
                          font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
    let headers = response.headers_mut();
    let fixed = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    // Responses contain secrets and customer data; assets set their own header.
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

/// Only the path: a query string may contain what must not be logged.
fn span(request: &Request) -> tracing::Span {
    tracing::debug_span!("request", method = %request.method(), path = request.uri().path())
}

fn panicked(_: Box<dyn std::any::Any + Send>) -> Response {
    // The panic hook has logged the message and the location.
    Problem::internal("request handler panicked", "see the panic message").into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_of_few_kinds() {
        for (path, rule, kind) in [
            ("/v1/tenants/{tenant}/events", Rule::Emit, metrics::Kind::Emit),
            ("/v1/tenants/{tenant}/events", Rule::Own, metrics::Kind::Api),
            ("/healthz", Rule::Open, metrics::Kind::Open),
            ("/deliveries", Rule::See, metrics::Kind::Page),
        ] {
            assert_eq!(counted(path, rule), kind, "{path}");
        }
    }

    /// Tenant paths must never end up with an open rule.
    #[tokio::test]
    async fn only_health_the_description_and_the_ways_in_are_open() {
        let list = build(crate::auth::tests::app().await, None, Live::default()).1;
        let open: Vec<&str> = list
            .iter()
            .filter(|route| route.rule == Rule::Open)
            .map(|route| route.path)
            .collect();
        assert_eq!(
            open,
            [
                "/healthz",
                "/readyz",
                "/openapi.json",
                "/docs",
                "/assets/docs.css",
                "/assets/style.css",
                "/assets/app.js",
                "/assets/mark.svg",
                "/favicon.ico",
                "/assets/inter.woff2",
                "/sign-in",
                "/sign-in",
                "/portal"
            ]
        );
        for route in list.iter().filter(|route| route.path.contains("{tenant}/")) {
            assert!(
                matches!(route.rule, Rule::Own | Rule::Emit | Rule::Admin),
                "{route:?}"
            );
        }
    }
}
