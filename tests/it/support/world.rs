//! An installation with something on every page: tenants, types with versions, endpoints that take and that fail,
//! deliveries in every state, a rotation under way.

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::PgPool;

use super::{Answer, Api, Database, Person, Postrider, Receiver, until};

/// The seeded past in names that look like somebody's.
const RENAME_SEEDS: &str = "
    update postrider.tenants set slug = n.slug, name = initcap(n.slug)
    from unnest(array['initech', 'umbrella', 'hooli', 'stark', 'wayne', 'tyrell', 'cyberdyne', 'soylent'])
        with ordinality as n (slug, number)
    where tenants.slug = 'seed-' || n.number;
    update postrider.endpoints e set url = 'https://' || t.slug || '.example.com/hooks/' || e.shard
    from postrider.tenants t where t.id = e.tenant_id and e.url like 'https://seed-%';
    update postrider.event_types set name = replace(name, 'seed.', 'payment.') where name like 'seed.%'";

/// Enough to fill a page of a list.
const EVENTS: usize = 45;

/// What a customer, or a receiver of theirs, could put into a page.
pub(crate) const HOSTILE: &str = r#"<script>window.hacked=1</script><img src=x onerror="window.hacked=1">"><svg onload=window.hacked=1>'-alert(1)-'"#;

pub(crate) struct World {
    own: Place,
    foreign: Place,
    receiver: Receiver,
}

/// What there is of one tenant.
struct Place {
    endpoint: String,
    delivery: String,
    dead: String,
}

impl World {
    pub(crate) async fn make(program: &Postrider) -> Self {
        let description = "Orders and invoices of the shop";
        Self::with(
            program,
            description,
            json!({ "object": "invoice", "id": "inv_1042", "amount": 4999 }),
        )
        .await
    }

    /// The same with markup and script wherever somebody outside can write.
    pub(crate) async fn hostile(program: &Postrider) -> Self {
        Self::with(program, HOSTILE, json!({ "id": HOSTILE, (HOSTILE): HOSTILE })).await
    }

    async fn with(program: &Postrider, text: &str, data: Value) -> Self {
        let api = program.api();
        let receiver = Receiver::start().await;
        let words = shown(text, r#"{"error":"the ledger is locked","retry":true}"#).to_owned();
        receiver.decide(move |request| match request.path.split('?').next() {
            Some(path) if path.starts_with("/broken") => Answer::Body(500, words.clone()),
            _ => Answer::Status(204),
        });
        for (tenant, name) in [("acme", text), ("globex", text)] {
            let body = json!({ "name": if text == HOSTILE { name } else { tenant } });
            api.call(Method::PUT, &format!("/tenants/{tenant}"), Some(body))
                .await;
        }
        types(&api, text).await;
        let own = place(&api, &receiver, "acme", text, &data).await;
        let foreign = place(&api, &receiver, "globex", text, &data).await;
        let rotate = format!("/tenants/acme/endpoints/{}/secret/rotate", own.endpoint);
        api.call(Method::POST, &rotate, Some(json!({}))).await;
        Self {
            own,
            foreign,
            receiver,
        }
    }

    /// With a past, for the pictures. What is shown of addresses is made up at the end, when nothing is sent any more.
    pub(crate) async fn busy(program: &Postrider, database: &Database) -> Self {
        let pool = PgPool::connect_with(database.options()).await.expect("connected");
        postrider_bench::seed::run(&pool, 20_000).await.expect("seeded");
        pool.close().await;
        database.execute(RENAME_SEEDS).await;
        let api = program.api();
        let world = Self::make(program).await;
        for (tenant, name) in [("acme", "Acme GmbH"), ("globex", "Globex")] {
            let path = format!("/tenants/{tenant}");
            api.call(Method::PUT, &path, Some(json!({ "name": name }))).await;
        }
        for (name, tells) in [
            ("order.created", "A customer has ordered"),
            ("order.shipped", "A parcel is on its way"),
            ("customer.updated", "An address or a name has changed"),
        ] {
            let schema = json!({ "type": "object", "properties": { "id": { "type": "string" } } });
            let body = json!({ "description": tells, "schemas": { "2026-01-15": schema } });
            api.call(Method::PUT, &format!("/event-types/{name}"), Some(body))
                .await;
        }
        let later =
            json!({ "description": "Warehouse", "retry_schedule": ["0s", "1h"], "types": ["order.*"] });
        api.endpoint("acme", &world.receiver.url("/broken/warehouse"), later)
            .await;
        let kinds = [
            "invoice.paid",
            "order.created",
            "order.shipped",
            "customer.updated",
        ];
        for number in 0..EVENTS {
            let data = json!({ "object": "order", "id": format!("ord_{}", 1000 + number), "amount": 990 + 17 * number });
            let event = json!({ "type": kinds[number % kinds.len()], "data": data });
            api.emit(["acme", "acme", "globex"][number % 3], event).await;
        }
        // Endpoints of the seeded past have no secret, and what waits for them goes on waiting.
        let served =
            "select count(*) from postrider.queue q join postrider.endpoints e on e.id = q.endpoint_id
                      where e.state = 'active'
                        and exists (select from postrider.secrets s where s.endpoint_id = e.id)";
        until("everything was tried", || async {
            let waiting = database.count(served).await;
            (waiting == 0).then_some(())
        })
        .await;
        world.replay_and_add_people(program).await;
        for body in [
            json!({ "role": "producer", "name": "Shop backend" }),
            json!({ "role": "tenant", "tenant": "acme", "name": "Acme's own tooling" }),
        ] {
            api.call(Method::POST, "/api-keys", Some(body)).await;
        }
        database
            .execute(
                "update postrider.endpoints
                 set url = regexp_replace(url, '^http://[^/]+/([a-z/]+).*$', 'https://hooks.example.com/\\1')",
            )
            .await;
        world
    }

    /// Globex has mended its receiver; two others may sign in.
    async fn replay_and_add_people(&self, program: &Postrider) {
        let api = program.api();
        self.receiver.decide(|_| Answer::Status(204));
        let body = json!({ "state": "dead" });
        let (status, told) = api
            .call(Method::POST, "/tenants/globex/replays", Some(body))
            .await;
        assert!(status.is_success(), "{told}");
        until("the replay is over", || async {
            let replays = api.get("/tenants/globex/replays").await;
            (replays["data"][0]["state"] != "running").then_some(())
        })
        .await;
        let mut admin = Person::signed_in(program).await;
        for (login, role) in [
            ("grace@example.com", "operator"),
            ("ada@example.com", "read-only"),
        ] {
            let (status, page) = admin
                .post_and_follow("/people", &[("login", login), ("role", role)])
                .await;
            assert!(status.is_success(), "{page}");
        }
    }

    /// The pages of the team by the names of their pictures.
    pub(crate) fn named_pages(&self) -> Vec<(String, String)> {
        let plain = self.pages().into_iter().map(|page| {
            let name = page.trim_start_matches('/').split('?').next().unwrap_or_default();
            let parts: Vec<&str> = name.split('/').filter(|part| !part.contains('_')).collect();
            (
                if name.is_empty() {
                    "overview".to_owned()
                } else {
                    parts.join("-")
                },
                page.clone(),
            )
        });
        let mut named: Vec<(String, String)> = Vec::new();
        for (name, page) in plain {
            // One delivery is called after what it is, its list has the plain name.
            let name = match page.as_str() {
                page if page.contains(&self.own.dead) => "delivery-dead".to_owned(),
                page if page.contains("signatures?") => "signature".to_owned(),
                page if page.contains("verify?") => continue,
                page if page.contains(&self.own.delivery) => "delivery".to_owned(),
                page if page.contains(&self.own.endpoint) => format!(
                    "endpoint-{}",
                    page.rsplit('/')
                        .next()
                        .filter(|last| !last.contains('_'))
                        .unwrap_or("one")
                ),
                _ => name,
            };
            named.push((name.replace('.', "-"), page));
        }
        named
    }

    pub(crate) fn delivery_page(&self) -> String {
        format!("/deliveries/{}", self.own.delivery)
    }

    /// Of the team.
    pub(crate) fn pages(&self) -> Vec<String> {
        let team = [
            "/tenants",
            "/tenants/acme",
            "/api-keys",
            "/people",
            "/audit",
            "/system",
            "/cells",
            "/account",
        ];
        let mut pages: Vec<String> = team.map(str::to_owned).to_vec();
        pages.extend(self.customer_pages());
        pages
    }

    /// Those that a customer has too.
    pub(crate) fn customer_pages(&self) -> Vec<String> {
        let mut pages: Vec<String> = CUSTOMER_PAGES.iter().map(|page| (*page).to_owned()).collect();
        pages.extend(self.own.pages());
        pages
    }

    /// Of another tenant, and of the team: not there for a customer of acme.
    pub(crate) fn foreign_pages(&self) -> Vec<String> {
        let mut pages = self.foreign.pages();
        pages.extend(["/tenants", "/people", "/audit", "/system", "/cells", "/api-keys"].map(str::to_owned));
        pages
    }
}

const CUSTOMER_PAGES: [&str; 13] = [
    "/",
    "/search?q=hook",
    "/events",
    "/deliveries",
    "/endpoints",
    "/endpoints/new",
    "/endpoints/rotations",
    "/replays",
    "/dead-letters",
    "/event-types",
    "/event-types/invoice.paid",
    "/verify",
    "/signatures",
];

impl Place {
    fn pages(&self) -> Vec<String> {
        vec![
            format!("/deliveries/{}", self.delivery),
            format!("/deliveries/{}", self.dead),
            format!("/signatures?delivery={}", self.delivery),
            format!("/verify?endpoint={}", self.endpoint),
            format!("/endpoints/{}", self.endpoint),
            format!("/endpoints/{}/secrets", self.endpoint),
            format!("/endpoints/{}/settings", self.endpoint),
        ]
    }
}

/// What stands there when nothing hostile is to stand there.
fn shown<'a>(text: &'a str, plain: &'a str) -> &'a str {
    if text == HOSTILE { text } else { plain }
}

async fn types(api: &Api, text: &str) {
    let id_words = shown(text, "The number on the invoice");
    let first = json!({ "type": "object", "required": ["id"], "properties": {
        "object": { "const": "invoice" },
        "id": { "type": "string", "description": id_words },
        "amount": { "type": "integer", "minimum": 0, "description": "In the smallest unit of the currency" },
        "note": { "type": "string" },
    } });
    let second = json!({ "type": "object", "required": ["id"], "properties": {
        "object": { "const": "invoice" },
        "id": { "type": "string", "description": id_words },
        "amount": { "type": "integer", "minimum": 0, "description": "In the smallest unit of the currency" },
        "currency": { "enum": ["EUR", "USD"] },
        "customer": { "type": "object", "properties": { "email": { "type": "string", "format": "email" } } },
    } });
    let words = shown(text, "An invoice was paid in full");
    let body = json!({ "description": words, "schemas": { "2026-01-15": first, "2026-06-01": second } });
    let (status, told) = api
        .call(Method::PUT, "/event-types/invoice.paid", Some(body))
        .await;
    assert!(status.is_success(), "{told}");
}

async fn place(api: &Api, receiver: &Receiver, tenant: &str, text: &str, data: &Value) -> Place {
    let path = |path: &str| receiver.url(&format!("{path}?of={}", url_words(text)));
    let more = json!({ "description": text, "headers": { "X-Token": "abc" } });
    let endpoint = api.endpoint(tenant, &path("/hook"), more).await;
    let more = json!({ "description": shown(text, "Bookkeeping"), "retry_schedule": ["0s"] });
    api.endpoint(tenant, &path("/broken"), more).await;
    let event = format!("evt_{tenant}");
    let emitted = json!({ "id": event, "type": "invoice.paid", "data": data });
    let (status, told) = api.emit(tenant, emitted).await;
    assert!(status.is_success(), "{told}");
    let delivered = api.wait_for_state(tenant, "delivered", 1).await;
    let dead = api.wait_for_state(tenant, "dead", 1).await;
    let id = |found: &[Value]| found[0]["id"].as_str().expect("an id").to_owned();
    Place {
        endpoint: endpoint.id,
        delivery: id(&delivered),
        dead: id(&dead),
    }
}

fn url_words(text: &str) -> String {
    url::form_urlencoded::byte_serialize(text.as_bytes()).collect()
}
