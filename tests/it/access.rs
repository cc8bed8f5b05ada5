//! Every route with everybody who might ask: the list is the router's own, so that a new route is tried without a line
//! here, and a new rule or role does not compile until its column is filled in below.

use std::{num::NonZeroU32, time::Duration};

use postrider_dashboard::{App, Emits, RequestRates, Role, Route, Rule, Trials};
use postrider_dispatcher::vault::Vault;
use postrider_proto::state::KeyRole;
use reqwest::{Client, Method, Response, StatusCode, redirect::Policy};
use serde_json::{Value, json};

use crate::support::{
    ADMIN_API_KEY, Api, Database, Form, MASTER_KEY, Person, Postrider, Receiver, text_of, until,
};

/// Stands in what only its owner may see.
const CANARY: &str = "canary-of-acme";

#[derive(Debug, Clone, PartialEq)]
enum Caller {
    Nobody,
    WrongKey,
    /// A tenant's key is that of the tenant whose things are asked for.
    Key(KeyRole),
    /// The key of another tenant.
    ForeignKey,
    /// A customer's session is of the tenant whose things are asked for.
    Session(Role),
    /// A customer of another tenant.
    ForeignSession,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Admitted,
    /// 401, or the way to the door for people.
    WhoAreYou,
    /// 403.
    Forbidden,
    /// 404: whether it exists is not told.
    NotThere,
    /// The route is about nothing of anybody's: whoever comes this far may go on.
    Either,
}

/// What must be, said once more and apart from the code that does it. No rule and no role may be left out.
fn expected(rule: Rule, caller: &Caller, changes: bool) -> Verdict {
    use Verdict::{Admitted, Either, Forbidden, NotThere, WhoAreYou};
    let is_page = match rule {
        Rule::Open => return Admitted,
        Rule::Session
        | Rule::Account
        | Rule::See
        | Rule::Ask
        | Rule::Operate
        | Rule::Manage
        | Rule::SignedIn
        | Rule::Administer => true,
        Rule::Admin | Rule::Emit | Rule::Catalogue | Rule::Own => false,
    };
    match caller {
        Caller::Nobody | Caller::WrongKey => WhoAreYou,
        // A key opens no page, and a session no call of the API.
        Caller::Key(_) | Caller::ForeignKey if is_page => WhoAreYou,
        Caller::Session(_) | Caller::ForeignSession if !is_page => WhoAreYou,
        Caller::Key(KeyRole::Admin) => Admitted,
        Caller::Key(KeyRole::Producer) => match rule {
            Rule::Emit => Admitted,
            _ => Forbidden,
        },
        Caller::Key(KeyRole::Tenant) => match rule {
            Rule::Catalogue | Rule::Own => Admitted,
            _ => Forbidden,
        },
        Caller::ForeignKey => match rule {
            Rule::Own => NotThere,
            Rule::Catalogue => Admitted,
            _ => Forbidden,
        },
        Caller::Session(Role::Admin) => Admitted,
        Caller::Session(Role::Operator) => match rule {
            Rule::Manage | Rule::Administer => Forbidden,
            _ => Admitted,
        },
        Caller::Session(Role::ReadOnly) => match rule {
            Rule::Session | Rule::Account | Rule::Ask => Admitted,
            Rule::See | Rule::SignedIn if !changes => Admitted,
            _ => Forbidden,
        },
        Caller::Session(Role::Customer) => match rule {
            Rule::Account | Rule::SignedIn | Rule::Administer => NotThere,
            _ => Admitted,
        },
        Caller::ForeignSession => match rule {
            Rule::Session | Rule::Ask => Either,
            Rule::See | Rule::Operate | Rule::Manage => NotThere,
            _ => NotThere,
        },
    }
}

pub(crate) fn all_routes() -> Vec<Route> {
    let pool = sqlx::PgPool::connect_lazy("postgres://nobody@127.0.0.1:1/none").expect("a form");
    postrider_dashboard::routes(App {
        emits: Emits::new(pool.clone().into(), Default::default()).into(),
        pool: pool.clone().into(),
        lookups: pool.clone().into(),
        home: pool.into(),
        cells: Default::default(),
        cell: None,
        limits: Default::default(),
        wake: Default::default(),
        vault: Vault::parse(MASTER_KEY).expect("a key"),
        guard: Default::default(),
        defaults: Default::default(),
        public_url: "http://127.0.0.1".to_owned(),
        admin_api_key: ADMIN_API_KEY.to_owned(),
        metrics: String::new,
        check_log_filter: |_| Ok(()),
        tracer: Default::default(),
        trials: Trials::new(Default::default()).expect("a client"),
        request_rates: RequestRates::new(NonZeroU32::MAX, NonZeroU32::MAX).into(),
        stop: Default::default(),
        trusted_proxies: Default::default(),
        streams: postrider_dashboard::streams(),
    })
}

/// One thing of each kind that a path can name.
pub(crate) struct Things {
    pub(crate) tenant: &'static str,
    pub(crate) endpoint: String,
    pub(crate) event: String,
    pub(crate) delivery: String,
    pub(crate) key: String,
    pub(crate) tenant_key: String,
    pub(crate) replay: String,
}

impl Things {
    pub(crate) async fn of(api: &Api, tenant: &'static str, url: &str) -> Self {
        api.tenant(tenant).await;
        let made = api
            .endpoint(
                tenant,
                url,
                json!({ "description": format!("canary-of-{tenant}") }),
            )
            .await;
        let event = json!({ "type": "invoice.paid", "data": { "x": format!("canary-of-{tenant}") } });
        let (_, event) = api.emit(tenant, event).await;
        let event = event["id"].as_str().expect("an id").to_owned();
        let delivered = api.wait_for_state(tenant, "delivered", 1).await;
        let body = json!({ "role": "tenant", "tenant": tenant, "name": "t" });
        let (_, key) = api.call(Method::POST, "/api-keys", Some(body)).await;
        let path = format!("/tenants/{tenant}/replays");
        let (_, replay) = api
            .call(Method::POST, &path, Some(json!({ "state": "dead" })))
            .await;
        let path = format!("/tenants/{tenant}/endpoints/{}/alert", made.id);
        let (status, alert) = api
            .call(Method::PUT, &path, Some(json!({ "dead_letters": 5 })))
            .await;
        assert!(status.is_success(), "{alert}");
        Self {
            tenant,
            replay: replay["id"]
                .as_str()
                .unwrap_or_else(|| panic!("{replay}"))
                .to_owned(),
            endpoint: made.id,
            event,
            delivery: delivered[0]["id"].as_str().expect("an id").to_owned(),
            key: key["id"].as_str().expect("an id").to_owned(),
            tenant_key: key["key"].as_str().expect("a key").to_owned(),
        }
    }

    /// The route's path about these things; the tenant in it may be another.
    pub(crate) fn path(&self, route: &Route, tenant: &str) -> String {
        let mut path = route.path.to_owned();
        for (name, value) in [
            ("{tenant}", tenant),
            ("{slug}", tenant),
            ("{endpoint}", &self.endpoint),
            ("{event}", &self.event),
            ("{delivery}", &self.delivery),
            ("{key}", &self.key),
            ("{type}", "invoice.paid"),
            ("{login}", "looker"),
            ("{listener}", "lis_000000000000000000000000"),
            ("{replay}", &self.replay),
            // Only admins ask for these, and there is none.
            ("{erasure}", "ers_0000000000000000"),
            ("{move}", "mov_000000000000000000000000"),
            ("{cell}", "nowhere"),
        ] {
            path = path.replace(name, value);
        }
        assert!(
            !path.contains('{'),
            "say in `Things::path` what the new part of {} is",
            route.path
        );
        path
    }

    /// Whether the path names something inside a tenant.
    fn is_named_by(route: &Route) -> bool {
        ["{endpoint}", "{event}", "{delivery}", "{replay}"]
            .iter()
            .any(|name| route.path.contains(name))
    }
}

/// Who can ask, with what shows who they are.
struct Callers {
    client: Client,
    producer: String,
    sessions: Vec<(Caller, String)>,
}

impl Callers {
    async fn of(program: &Postrider, own: &Things, foreign: &Things) -> Self {
        let api = program.api();
        let body = json!({ "role": "producer", "name": "p" });
        let (_, producer) = api.call(Method::POST, "/api-keys", Some(body)).await;
        let mut admin = Person::signed_in(program).await;
        let mut sessions = vec![(Caller::Session(Role::Admin), admin.cookie())];
        for (login, word, role) in [
            ("op", "operator", Role::Operator),
            ("looker", "read-only", Role::ReadOnly),
        ] {
            let fields = [("login", login), ("role", word)];
            let (status, page) = admin.post_and_follow("/people", &fields).await;
            assert_eq!(status, StatusCode::OK, "{page}");
            let password = text_of(&page, "new-password");
            let mut person = Person::new(program);
            assert!(person.sign_in_as(login, &password).await.is_redirection());
            sessions.push((Caller::Session(role), person.cookie()));
        }
        for (things, caller) in [
            (own, Caller::Session(Role::Customer)),
            (foreign, Caller::ForeignSession),
        ] {
            let path = format!("/tenants/{}/portal-links", things.tenant);
            let (_, link) = api.call(Method::POST, &path, None).await;
            let link = url::Url::parse(link["url"].as_str().expect("a link")).expect("a URL");
            let mut customer = Person::new(program);
            let way_in = format!("{}?{}", link.path(), link.query().expect("a token"));
            assert!(customer.visit(&way_in).await.0.is_redirection());
            sessions.push((caller, customer.cookie()));
        }
        Self {
            client: crate::support::http_client()
                .redirect(Policy::none())
                .timeout(Duration::from_secs(30))
                .build()
                .expect("a client"),
            producer: producer["key"].as_str().expect("a key").to_owned(),
            sessions,
        }
    }

    fn all(&self) -> Vec<Caller> {
        let keys = KeyRole::ALL.iter().map(|role| Caller::Key(*role));
        let sessions = self.sessions.iter().map(|(caller, _)| caller.clone());
        [Caller::Nobody, Caller::WrongKey, Caller::ForeignKey]
            .into_iter()
            .chain(keys)
            .chain(sessions)
            .collect()
    }

    async fn ask(
        &self,
        program: &Postrider,
        route: &Route,
        path: &str,
        caller: &Caller,
        things: [&Things; 2],
    ) -> Response {
        let method: Method = route.method.parse().expect("a method");
        let mut request = self.client.request(method.clone(), program.url(path));
        if !method.is_safe() {
            // One that is read, so that the answer is about the thing and not about the form.
            let form = match route.path {
                "/v1/tenants/{tenant}/endpoints/{endpoint}/alert" => r#"{"dead_letters":5}"#,
                _ => "{}",
            };
            request = match route.path.starts_with("/v1/") {
                true => request.header("content-type", "application/json").body(form),
                false => request
                    .header("content-type", "application/x-www-form-urlencoded")
                    .body("a=b"),
            };
        }
        let key = match caller {
            Caller::WrongKey => Some("prk_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
            Caller::Key(KeyRole::Admin) => Some(ADMIN_API_KEY),
            Caller::Key(KeyRole::Producer) => Some(self.producer.as_str()),
            Caller::Key(KeyRole::Tenant) => Some(things[0].tenant_key.as_str()),
            Caller::ForeignKey => Some(things[1].tenant_key.as_str()),
            Caller::Nobody | Caller::Session(_) | Caller::ForeignSession => None,
        };
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        if let Some((_, cookie)) = self.sessions.iter().find(|(one, _)| one == caller) {
            request = request.header("cookie", cookie);
        }
        request.send().await.expect("an answer")
    }
}

/// What an answer amounts to. A form without its token gets past the rule and no further, whoever sends it.
fn verdict(status: StatusCode, location: &str, body: &str) -> Verdict {
    match status {
        StatusCode::UNAUTHORIZED => Verdict::WhoAreYou,
        _ if status.is_redirection() && location.starts_with("/sign-in") => Verdict::WhoAreYou,
        StatusCode::FORBIDDEN if body.contains("was not sent from a page of your session") => {
            Verdict::Admitted
        }
        StatusCode::FORBIDDEN => Verdict::Forbidden,
        StatusCode::NOT_FOUND => Verdict::NotThere,
        _ => Verdict::Admitted,
    }
}

async fn judged(answer: Response) -> (Verdict, StatusCode, String) {
    let status = answer.status();
    let location = answer
        .headers()
        .get("location")
        .and_then(|value| value.to_str().ok());
    let location = location.unwrap_or_default().to_owned();
    let kind = answer.headers().get("content-type");
    // Live figures and the requests of a listener go on for as long as they are read.
    let is_endless = kind.is_some_and(|kind| kind == "text/event-stream" || kind == "application/x-ndjson");
    let body = match is_endless {
        true => String::new(),
        false => answer.text().await.expect("a body"),
    };
    (verdict(status, &location, &body), status, body)
}

async fn start(database: &Database, receiver: &Receiver) -> (Postrider, Things, Things) {
    let program = Postrider::start_with(database, &[("POSTRIDER_TENANT_REQUEST_RATE", "100000")]).await;
    let api = program.api();
    api.event_type("invoice.paid").await;
    let own = Things::of(&api, "acme", &receiver.url("/acme")).await;
    let foreign = Things::of(&api, "globex", &receiver.url("/globex")).await;
    (program, own, foreign)
}

#[tokio::test]
async fn each_route_admits_those_it_should_and_nobody_else() {
    let database = Database::fresh().await;
    let receiver = Receiver::start().await;
    let (program, own, foreign) = start(&database, &receiver).await;
    let callers = Callers::of(&program, &own, &foreign).await;
    let routes = all_routes();
    assert!(routes.len() > 40, "the router's own list");
    let mut tried = 0;
    // What deletes is tried last, and with those who may not: whoever may would take the things away.
    for route in &routes {
        let changes = !matches!(route.method, "GET");
        let path = own.path(route, own.tenant);
        for caller in callers.all() {
            let expected = expected(route.rule, &caller, changes);
            let destroys = route.method == "DELETE" || route.path == "/sign-in" && changes;
            if expected == Verdict::Either || destroys && expected == Verdict::Admitted {
                continue;
            }
            if caller == Caller::ForeignSession
                && expected == Verdict::NotThere
                && (changes || !Things::is_named_by(route))
            {
                // Without its token a form is not even read; without an id a page shows their own things. Below.
                continue;
            }
            let answer = callers
                .ask(&program, route, &path, &caller, [&own, &foreign])
                .await;
            let (verdict, status, body) = judged(answer).await;
            let what = format!("{} {path} as {caller:?}: {status} {body}", route.method);
            assert!(!status.is_server_error(), "{what}");
            // There is no erasure, for admins neither, no listener, no other cell and no move.
            let unmade = ["{listener}", "{erasure}", "{move}", "{cell}"];
            if unmade.iter().any(|part| route.path.contains(part))
                && verdict == Verdict::NotThere
                && expected == Verdict::Admitted
            {
                continue;
            }
            assert_eq!(verdict, expected, "{what}");
            assert!(verdict == Verdict::Admitted || !body.contains(CANARY), "{what}");
            tried += 1;
        }
    }
    println!("{} routes, {tried} answers", routes.len());
}

#[tokio::test]
async fn another_tenant_s_things_are_not_there_under_one_s_own_name() {
    let database = Database::fresh().await;
    let receiver = Receiver::start().await;
    let (program, own, foreign) = start(&database, &receiver).await;
    let callers = Callers::of(&program, &own, &foreign).await;
    let before = program
        .api()
        .get(&format!("/tenants/acme/endpoints/{}", own.endpoint))
        .await;
    for route in all_routes().iter().filter(|route| Things::is_named_by(route)) {
        // The ids of acme's things in paths of globex: with its own key, and with one that may see both.
        let path = own.path(route, foreign.tenant);
        let asked: &[Caller] = match route.rule {
            Rule::Own => &[Caller::ForeignKey, Caller::Key(KeyRole::Admin)],
            Rule::See | Rule::Operate | Rule::Manage => &[Caller::ForeignSession],
            _ => &[],
        };
        for caller in asked {
            let answer = match (caller, route.method) {
                (Caller::ForeignSession, "POST") => {
                    let (_, cookie) = callers
                        .sessions
                        .iter()
                        .find(|(one, _)| one == caller)
                        .expect("a session");
                    Person::with_cookie(&program, cookie)
                        .post(&path, &[("seen", "1")])
                        .await
                }
                _ => {
                    let answer = callers
                        .ask(&program, route, &path, caller, [&own, &foreign])
                        .await;
                    (answer.status(), answer.text().await.expect("a body"))
                }
            };
            let what = format!("{} {path} as {caller:?}: {answer:?}", route.method);
            assert_eq!(answer.0, StatusCode::NOT_FOUND, "{what}");
            assert!(!answer.1.contains(CANARY), "{what}");
        }
    }
    let after = program
        .api()
        .get(&format!("/tenants/acme/endpoints/{}", own.endpoint))
        .await;
    assert_eq!(before, after, "and nothing was changed");
    assert_eq!(receiver.received().len(), 2, "nor sent again");
}

/// Those who may delete, with things made for it.
#[tokio::test]
async fn what_may_be_deleted_is_deleted_by_those_who_may() {
    let database = Database::fresh().await;
    let receiver = Receiver::start().await;
    let (program, own, _) = start(&database, &receiver).await;
    let admin = program.api();
    let tenant = program.api_with_key(&own.tenant_key);
    let deletions = all_routes();
    let deletions: Vec<&Route> = deletions
        .iter()
        .filter(|route| route.method == "DELETE")
        .collect();
    for route in &deletions {
        let mut paths = Vec::new();
        for _ in 0..2 {
            let path = match route.path {
                "/v1/tenants/{tenant}" => {
                    admin.tenant("short-lived").await;
                    "/tenants/short-lived".to_owned()
                }
                "/v1/tenants/{tenant}/pause" => {
                    let path = "/tenants/acme/pause".to_owned();
                    assert!(admin.call(Method::PUT, &path, None).await.0.is_success());
                    path
                }
                "/v1/event-types/{type}" => {
                    admin.event_type("short.lived").await;
                    "/event-types/short.lived".to_owned()
                }
                "/v1/tenants/{tenant}/endpoints/{endpoint}" => {
                    let made = admin.endpoint("acme", &receiver.url("/x"), json!({})).await;
                    format!("/tenants/acme/endpoints/{}", made.id)
                }
                "/v1/api-keys/{key}" => {
                    let body = json!({ "role": "producer", "name": "p" });
                    let (_, key) = admin.call(Method::POST, "/api-keys", Some(body)).await;
                    format!("/api-keys/{}", key["id"].as_str().expect("an id"))
                }
                "/v1/tenants/{tenant}/endpoints/{endpoint}/alert" => {
                    let path = format!("/tenants/acme/endpoints/{}/alert", own.endpoint);
                    let alert = Some(json!({ "dead_letters": 5 }));
                    assert!(admin.call(Method::PUT, &path, alert).await.0.is_success());
                    path
                }
                // Stopped, not taken away.
                "/v1/tenants/{tenant}/replays/{replay}" => format!("/tenants/acme/replays/{}", own.replay),
                "/v1/tenants/{tenant}/listeners/{listener}" => {
                    let (_, made) = admin.call(Method::POST, "/tenants/acme/listeners", None).await;
                    format!("/tenants/acme/listeners/{}", made["id"].as_str().expect("an id"))
                }
                // Needs another cell: tests/it/moves.rs.
                "/v1/moves/{move}" => break,
                path => panic!("say here what DELETE {path} takes away"),
            };
            paths.push(path);
            let (by, may) = match (paths.len(), route.rule) {
                (1, Rule::Own) => (&tenant, true),
                (1, _) => (&tenant, false),
                _ => (&admin, true),
            };
            let (answered, problem) = by.call(Method::DELETE, paths.last().expect("one"), None).await;
            assert_eq!(answered.is_success(), may, "{paths:?}: {answered} {problem}");
            assert!(
                may || answered == StatusCode::FORBIDDEN,
                "{paths:?}: {answered} {problem}"
            );
        }
    }
}

#[tokio::test]
async fn a_key_that_asks_too_often_is_told_when_to_come_back_and_others_are_served() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_TENANT_REQUEST_RATE", "3")]).await;
    let api = program.api();
    let mut keys = Vec::new();
    for tenant in ["acme", "globex"] {
        api.tenant(tenant).await;
        let body = json!({ "role": "tenant", "tenant": tenant, "name": "t" });
        let (_, key) = api.call(Method::POST, "/api-keys", Some(body)).await;
        keys.push(key["key"].as_str().expect("a key").to_owned());
    }
    let client = crate::support::http_client().build().expect("a client");
    let ask = |tenant: &str, key: &str| {
        client
            .get(program.url(&format!("/v1/tenants/{tenant}")))
            .bearer_auth(key)
            .send()
    };
    let refused = until("the limit is reached", || async {
        let answer = ask("acme", &keys[0]).await.expect("an answer");
        (answer.status() == StatusCode::TOO_MANY_REQUESTS).then_some(answer)
    })
    .await;
    assert_eq!(refused.headers()["retry-after"], "1");
    assert_eq!(refused.headers()["content-type"], "application/problem+json");
    let problem: Value = serde_json::from_str(&refused.text().await.expect("a body")).expect("JSON");
    assert_eq!(problem["status"], 429);
    assert_eq!(
        ask("globex", &keys[1]).await.expect("an answer").status(),
        StatusCode::OK
    );
    api.get("/tenants/acme").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(
        ask("acme", &keys[0]).await.expect("an answer").status(),
        StatusCode::OK
    );
}

/// A form that another site sends in a person's name is refused, on every page that has one.
#[tokio::test]
async fn no_form_is_taken_without_its_token() {
    let database = Database::fresh().await;
    let receiver = Receiver::start().await;
    let (program, own, foreign) = start(&database, &receiver).await;
    let callers = Callers::of(&program, &own, &foreign).await;
    let (admin, cookie) = &callers.sessions[0];
    assert_eq!(admin, &Caller::Session(Role::Admin));
    let client = crate::support::http_client()
        .redirect(Policy::none())
        .build()
        .expect("a client");
    let forms = all_routes();
    let forms: Vec<&Route> = forms
        .iter()
        .filter(|route| route.method != "GET" && !route.path.starts_with("/v1/") && route.rule != Rule::Open)
        .collect();
    assert!(forms.len() >= 5, "{forms:?}");
    for route in forms {
        for kind in [
            "application/x-www-form-urlencoded",
            "text/plain",
            "multipart/form-data",
            "application/json",
        ] {
            for body in ["csrf=", "csrf=AAAA&seen=1", "{\"csrf\":\"\"}"] {
                let answer = client
                    .post(program.url(&own.path(route, own.tenant)))
                    .header("cookie", cookie)
                    .header("origin", "https://evil.example")
                    .header("content-type", kind)
                    .body(body)
                    .send()
                    .await
                    .expect("an answer");
                assert_eq!(answer.status(), StatusCode::FORBIDDEN, "{route:?} {kind} {body}");
            }
        }
    }
    // The session lives on, and the page's own form is taken.
    let mut person = Person::with_cookie(&program, cookie);
    let (_, page) = person.visit("/deliveries").await;
    assert!(
        person
            .submit(&Form::find(&page, "/sign-out"))
            .await
            .0
            .is_redirection()
    );
}
