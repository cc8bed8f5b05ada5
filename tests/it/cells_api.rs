//! One API and one dashboard for several cells: requests go to the tenant's cell, lists have all of them, and what one cell does
//! not answer is missing without holding up the others.

use std::time::{Duration, Instant};

use postrider_dashboard::grpc::v1::{EmitBatchRequest, EmitRequest, Event, emitter_client::EmitterClient};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tonic::{Request, transport::Channel};

use crate::support::{ADMIN_API_KEY, Api, Database, Form, Launch, Person, Postrider, Receiver, until};

const SERVER: &str = "wal_level = logical
max_wal_senders = 20
max_replication_slots = 20
max_logical_replication_workers = 20
max_worker_processes = 40
";
/// Of cell 1.
const FIRST_ENDPOINT: i64 = 1 << 25;

/// A cell that does not answer is given up after three seconds; the rest is for a busy machine.
const PAGE_MAX: Duration = Duration::from_secs(10);

/// Home with everything in one process, and cell `a` on a server of its own with its dispatcher. `acme` lives in the cell, `beta`
/// at home, and each has an endpoint.
struct World {
    home: Database,
    cell: Database,
    program: Postrider,
    _dispatcher: Postrider,
    api: Api,
    receiver: Receiver,
}

async fn server() -> Database {
    Database::on_private_server_in(std::env::temp_dir(), SERVER).await
}

fn add(home: &Database, cell: &Database) -> Launch {
    Postrider::on_database("cells add a", home)
        .set("POSTRIDER_CELL_DATABASE_URL", cell.url())
        .set("POSTRIDER_CELL_SUPERUSER_URL", cell.url_as("postgres"))
        .set("POSTRIDER_REPLICATION_URL", home.url_as("postgres"))
}

impl World {
    async fn start() -> Self {
        let (home, cell) = (server().await, server().await);
        home.execute_here_as_superuser("alter role postrider replication")
            .await;
        // The cell appears while the API runs.
        let program = Postrider::start_with(&home, &[("POSTRIDER_GRPC_LISTEN", "127.0.0.1:0")]).await;
        let output = add(&home, &cell).output();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let dispatcher = Postrider::on_database("dispatcher", &cell)
            .set("POSTRIDER_HOME_DATABASE_URL", home.url())
            .start()
            .await;
        let (api, receiver) = (program.api(), Receiver::start().await);
        let world = Self {
            home,
            cell,
            program,
            _dispatcher: dispatcher,
            api,
            receiver,
        };
        world.reaches(true).await;
        let (status, acme) = world.put_tenant("acme", json!({ "cell": "a" })).await;
        assert_eq!(
            (status, &acme["cell"]),
            (StatusCode::CREATED, &json!("a")),
            "{acme}"
        );
        let (status, beta) = world.put_tenant("beta", json!({ "cell": "home" })).await;
        assert_eq!(
            (status, &beta["cell"]),
            (StatusCode::CREATED, &json!("home")),
            "{beta}"
        );
        world.api.event_type("invoice.paid").await;
        for tenant in ["acme", "beta"] {
            let url = world.receiver.url(&format!("/{tenant}"));
            world.api.endpoint(tenant, &url, json!({})).await;
        }
        world
    }

    async fn put_tenant(&self, slug: &str, settings: Value) -> (StatusCode, Value) {
        let path = format!("/tenants/{slug}");
        self.api.call(Method::PUT, &path, Some(settings)).await
    }

    /// Waits until the API knows that the cell responds, or does not.
    async fn reaches(&self, is_up: bool) {
        until("the API has noticed", || async {
            let cells = self.api.get("/cells").await;
            let cell = cells["data"].as_array()?.iter().find(|one| one["name"] == "a")?;
            (cell["reachable"] == is_up).then_some(())
        })
        .await;
    }

    async fn emit(&self, tenant: &str, id: &str, more: Value) -> (StatusCode, Value) {
        let mut event = json!({ "type": "invoice.paid", "id": id, "data": { "id": id } });
        if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
            event.extend(more);
        }
        self.api.emit(tenant, event).await
    }

    async fn drained(&self) {
        until("the outbox is empty", || async {
            (self
                .home
                .count("select count(*) from postrider.cell_outbox")
                .await
                == 0)
                .then_some(())
        })
        .await;
    }
}

async fn pages(person: &mut Person<'_>, paths: &[&str], wanted: &[&str]) {
    for path in paths {
        let (status, page) = person.visit(path).await;
        assert_eq!(status, StatusCode::OK, "{path}: {page}");
        for text in wanted {
            assert!(page.contains(text), "{path} lacks {text}: {page}");
        }
        assert!(!page.contains("No response from"), "{path}: {page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_about_a_tenant_are_served_by_its_cell_and_lists_have_all() {
    let world = World::start().await;
    let api = &world.api;
    let endpoint: i64 = world
        .cell
        .count("select max(id)::bigint from postrider.endpoints")
        .await;
    assert_eq!(endpoint, FIRST_ENDPOINT);
    assert_eq!(
        world.home.count("select count(*) from postrider.endpoints").await,
        1
    );

    // A new tenant goes where the fewest are, and stays there.
    world.put_tenant("gamma", json!({ "cell": "home" })).await;
    let (_, delta) = world.put_tenant("delta", json!({})).await;
    assert_eq!(delta["cell"], "a");
    let (status, _) = world.put_tenant("acme", json!({ "cell": "home" })).await;
    assert_eq!(status, StatusCode::CONFLICT);
    let (status, problem) = world.put_tenant("other", json!({ "cell": "b" })).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");

    for tenant in ["acme", "beta"] {
        let (status, event) = world.emit(tenant, &format!("one-{tenant}"), json!({})).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{event}");
        let (status, _) = world.emit(tenant, &format!("one-{tenant}"), json!({})).await;
        assert_eq!(status, StatusCode::OK, "the same event again");
        let delivered = api.wait_for_state(tenant, "delivered", 1).await;
        assert_eq!(delivered[0]["event"], format!("one-{tenant}"));
    }
    // Straight to the cell, and nothing of it at home.
    assert_eq!(world.home.count("select count(*) from postrider.events").await, 1);
    let body = json!({ "type": "invoice.paid", "data": {} });
    let path = "/tenants/acme/events";
    let (status, replayed, first) = api.post_with_key(path, "key", body.clone()).await;
    assert_eq!((status, replayed), (StatusCode::ACCEPTED, false), "{first}");
    let (_, replayed, again) = api.post_with_key(path, "key", body).await;
    assert!(replayed && again == first, "{again}");
    let (status, _) = api
        .call(
            Method::POST,
            "/tenants/acme/events/batch",
            Some(json!({ "events": [{ "type": "invoice.paid", "id": "in-batch", "data": {} }] })),
        )
        .await;
    assert_eq!(status, StatusCode::ACCEPTED);
    assert_eq!(api.get("/tenants/acme/events/in-batch").await["id"], "in-batch");
    api.wait_for_state("acme", "delivered", 3).await;

    emit_over_grpc(&world).await;
    let listed = api.get("/endpoints?limit=1").await;
    let next = listed["next_cursor"].as_str().expect("more");
    let rest = api.get(&format!("/endpoints?limit=1&cursor={next}")).await;
    let tenants = [&listed["data"][0]["tenant"], &rest["data"][0]["tenant"]];
    assert_eq!(tenants, ["beta", "acme"], "in order of creation within a cell");
    assert!(rest["next_cursor"].is_null(), "{rest}");
    let cells = api.get("/cells").await;
    let counted: Vec<(&str, i64)> = cells["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|cell| {
            (
                cell["name"].as_str().expect("a name"),
                cell["tenants"].as_i64().expect("a number"),
            )
        })
        .collect();
    assert_eq!(counted, [("home", 2), ("a", 2)]);
    pages_show_all(&world).await;
}

async fn emit_over_grpc(world: &World) {
    let lines = world.program.log_lines();
    let address = lines.iter().find_map(|line| {
        let line: Value = serde_json::from_str(line).ok()?;
        (line["service"] == "grpc").then(|| line["address"].as_str().map(str::to_owned))?
    });
    let address = format!("http://{}", address.expect("an address"));
    let channel = Channel::from_shared(address).expect("a URL").connect().await;
    let mut client = EmitterClient::new(channel.expect("connected"));
    let event = |id: &str| Event {
        r#type: "invoice.paid".to_owned(),
        data: "{}".to_owned(),
        id: Some(id.to_owned()),
        ..Event::default()
    };
    let mut one = Request::new(EmitRequest {
        tenant: "acme".to_owned(),
        event: Some(event("over-grpc")),
    });
    let mut batch = Request::new(EmitBatchRequest {
        tenant: "acme".to_owned(),
        events: vec![event("over-grpc"), event("in-grpc-batch")],
    });
    let key = format!("Bearer {ADMIN_API_KEY}");
    for metadata in [one.metadata_mut(), batch.metadata_mut()] {
        metadata.insert("authorization", key.parse().expect("a value"));
    }
    client.emit(one).await.expect("emitted");
    let emitted = client.emit_batch(batch).await.expect("emitted").into_inner();
    assert!(
        emitted.events[0].duplicate && !emitted.events[1].duplicate,
        "{emitted:?}"
    );
    world.api.wait_for_state("acme", "delivered", 5).await;
}

async fn pages_show_all(world: &World) {
    let (both, admin) = (
        ["one-acme", "one-beta"],
        &mut Person::signed_in(&world.program).await,
    );
    pages(admin, &["/deliveries", "/events"], &both).await;
    pages(
        admin,
        &["/deliveries?tenant=acme", "/events?event=one-acme"],
        &["one-acme"],
    )
    .await;
    let urls = [world.receiver.url("/acme"), world.receiver.url("/beta")];
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    pages(admin, &["/endpoints", "/search?q=127.0.0.1"], &urls).await;
    pages(admin, &["/tenants", "/audit"], &["acme", "beta"]).await;
    pages(admin, &["/tenants/acme", "/cells", "/system?cell=a"], &["cell"]).await;
    let others = [
        "/",
        "/endpoints/rotations",
        "/dead-letters",
        "/replays",
        "/verify",
        "/signatures",
        "/system",
        "/event-types",
        "/tenants/beta",
        "/audit?tenant=acme",
    ];
    pages(admin, &others, &[]).await;
    assert_eq!(admin.visit("/system?cell=b").await.0, StatusCode::NOT_FOUND);
    // By their ids alone.
    for tenant in ["acme", "beta"] {
        let delivered = world.api.deliveries(tenant, "state=delivered").await;
        let text = |name: &str| delivered[0][name].as_str().expect("an id").to_owned();
        let (delivery, endpoint, event) = (text("id"), text("endpoint"), text("event"));
        for path in [
            format!("/deliveries/{delivery}"),
            format!("/endpoints/{endpoint}"),
            format!("/endpoints/{endpoint}/settings"),
            format!("/events/{event}"),
            format!("/deliveries?endpoint={endpoint}"),
            format!("/signatures?delivery={delivery}"),
            format!("/verify?endpoint={endpoint}"),
        ] {
            let (status, page) = admin.visit(&path).await;
            assert_eq!(status, StatusCode::OK, "{path}: {page}");
        }
        // The result of a form is kept at home, with the session.
        let (_, page) = admin.visit(&format!("/endpoints/{endpoint}")).await;
        let form = Form::find(&page, &format!("/endpoints/{endpoint}/test"));
        let (status, page) = admin.submit_and_follow(&form).await;
        assert_eq!(status, StatusCode::OK);
        assert!(
            page.contains("id=\"tested\"") && page.contains(">delivered<"),
            "{page}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_is_paused_limited_and_deleted_in_its_cell() {
    let world = World::start().await;
    let api = &world.api;
    let (status, paused) = api
        .call(
            Method::PUT,
            "/tenants/acme/pause",
            Some(json!({ "reason": "test" })),
        )
        .await;
    assert_eq!(status, StatusCode::OK, "{paused}");
    world.emit("acme", "held", json!({})).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(api.deliveries("acme", "state=delivered").await.len(), 0);
    let mut admin = Person::signed_in(&world.program).await;
    assert!(admin.visit("/tenants/acme").await.1.contains("Paused since"));
    let (status, _) = api.call(Method::DELETE, "/tenants/acme/pause", None).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    api.wait_for_state("acme", "delivered", 1).await;

    let quota = json!({ "emits_per_minute": 1, "stored_bytes": null });
    let (status, quotas) = api.call(Method::PUT, "/tenants/acme/quotas", Some(quota)).await;
    assert_eq!(status, StatusCode::OK, "{quotas}");
    let mut statuses = Vec::new();
    for n in 0..4 {
        statuses.push(world.emit("acme", &format!("limited-{n}"), json!({})).await.0);
    }
    assert!(statuses.contains(&StatusCode::TOO_MANY_REQUESTS), "{statuses:?}");
    assert_eq!(api.get("/tenants/acme/quotas").await["emits_this_minute"], 1);

    let (status, _) = api.call(Method::DELETE, "/tenants/acme", None).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    assert_eq!(
        world.emit("acme", "late", json!({})).await.0,
        StatusCode::NOT_FOUND
    );
    let left = "select count(*) from postrider.endpoints where state <> 'deleted'";
    assert_eq!(world.cell.count(left).await, 0);
    until("its data is erased", || async {
        let erasures = api.get("/erasures").await;
        (erasures["data"][0]["tenant"] == "acme" && erasures["data"][0]["state"] == "done").then_some(())
    })
    .await;
    assert_eq!(world.cell.count("select count(*) from postrider.events").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_that_is_down_holds_up_nobody_else() {
    let world = World::start().await;
    let api = &world.api;
    world.emit("acme", "before", json!({ "ordering_key": "k" })).await;
    api.wait_for_state("acme", "delivered", 1).await;
    world.cell.stop_server().await;
    world.reaches(false).await;

    // Events wait at home, in order. Until every pool has noticed, an emit is told to try again.
    for id in ["first", "second"] {
        until("it is accepted at home", || async {
            let (status, event) = world.emit("acme", id, json!({ "ordering_key": "k" })).await;
            let is_accepted = status.is_success();
            assert!(
                is_accepted || status == StatusCode::SERVICE_UNAVAILABLE,
                "{event}"
            );
            is_accepted.then_some(())
        })
        .await;
    }
    let body = json!({ "type": "invoice.paid", "data": {} });
    let (path, key) = ("/tenants/acme/events", "key");
    let (status, _, first) = api.post_with_key(path, key, body.clone()).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{first}");
    let (_, replayed, again) = api.post_with_key(path, key, body.clone()).await;
    assert!(replayed && again == first, "{again}");
    let (status, _) = api.call(Method::GET, "/tenants/acme/deliveries", None).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);

    // Everything else goes on, and says what is missing.
    assert_eq!(
        world.emit("beta", "at-home", json!({})).await.0,
        StatusCode::ACCEPTED
    );
    api.wait_for_state("beta", "delivered", 1).await;
    let mut admin = Person::signed_in(&world.program).await;
    for path in [
        "/",
        "/deliveries",
        "/endpoints",
        "/events",
        "/dead-letters",
        "/audit",
        "/tenants",
        "/search?q=x",
    ] {
        let began = Instant::now();
        let (status, page) = admin.visit(path).await;
        assert_eq!(status, StatusCode::OK, "{path}");
        assert!(page.contains("No response from: a."), "{path}: {page}");
        assert!(began.elapsed() < PAGE_MAX, "{path}: {:?}", began.elapsed());
    }

    assert!(world.cell.start_server().await);
    world.reaches(true).await;
    // It goes behind those that wait, or after them.
    let (status, event) = world.emit("acme", "third", json!({ "ordering_key": "k" })).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{event}");
    world.drained().await;
    // The response is stored at home, the event is here.
    let (status, _, again) = api.post_with_key(path, key, body).await;
    assert_eq!((status, &again["id"]), (StatusCode::OK, &first["id"]), "{again}");
    api.wait_for_state("acme", "delivered", 5).await;
    assert_eq!(world.cell.count("select count(*) from postrider.events").await, 5);
    let order = world
        .cell
        .text("select string_agg(chosen_id, ' ' order by sequence) from postrider.events where sequence is not null")
        .await;
    assert_eq!(order, "before first second third");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_moving_tenant_wait_and_nothing_else_of_it_changes() {
    let world = World::start().await;
    let api = &world.api;
    world
        .home
        .execute("update postrider.tenants set moving = true where slug = 'acme'")
        .await;
    until("the cell has heard of it", || async {
        let moving = "select count(*) from postrider.tenants where moving";
        (world.cell.count(moving).await == 1).then_some(())
    })
    .await;
    // Also within the moment in which the API remembers where it was.
    let (status, event) = world.emit("acme", "on-the-way", json!({})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{event}");
    let url = world.receiver.url("/more");
    let (status, _) = api
        .call(
            Method::POST,
            "/tenants/acme/endpoints",
            Some(json!({ "url": url })),
        )
        .await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(api.deliveries("acme", "").await.len(), 0);
    world
        .home
        .execute("update postrider.tenants set moving = false where slug = 'acme'")
        .await;
    api.wait_for_state("acme", "delivered", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn customers_see_their_own_tenant_wherever_it_lives() {
    let world = World::start().await;
    let api = &world.api;
    for tenant in ["acme", "beta"] {
        world.emit(tenant, &format!("one-{tenant}"), json!({})).await;
        api.wait_for_state(tenant, "delivered", 1).await;
    }
    for (tenant, other) in [("acme", "beta"), ("beta", "acme")] {
        let path = format!("/tenants/{tenant}/portal-links");
        let (status, made) = api.call(Method::POST, &path, None).await;
        assert_eq!(status, StatusCode::CREATED, "{made}");
        let url = url::Url::parse(made["url"].as_str().expect("a url")).expect("a url");
        let mut customer = Person::new(&world.program);
        let entry = format!("{}?{}", url.path(), url.query().expect("a token"));
        assert!(customer.visit(&entry).await.0.is_redirection());
        for path in ["/deliveries", "/events", &format!("/deliveries?tenant={other}")] {
            let (status, page) = customer.visit(path).await;
            assert_eq!(status, StatusCode::OK);
            let foreign = format!("one-{other}");
            assert!(
                page.contains(&format!("one-{tenant}")) && !page.contains(&foreign),
                "{page}"
            );
        }
        let theirs = api.deliveries(other, "").await;
        let id = theirs[0]["id"].as_str().expect("an id");
        let (status, _) = customer.visit(&format!("/deliveries/{id}")).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        let own = api.get(&format!("/tenants/{tenant}/endpoints")).await;
        let endpoint = own["data"][0]["id"].as_str().expect("an id").to_owned();
        let (_, page) = customer.visit(&format!("/endpoints/{endpoint}/secrets")).await;
        let form = Form::find(&page, &format!("/endpoints/{endpoint}/secrets/reveal"));
        let (status, page) = customer.submit_and_follow(&form).await;
        assert_eq!(status, StatusCode::OK);
        assert!(page.contains("whsec_"), "{page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sending_is_stopped_in_all_cells() {
    let world = World::start().await;
    let api = &world.api;
    let stopped = json!({ "stopped": true, "reason": "test" });
    let (status, state) = api.call(Method::PUT, "/sending", Some(stopped)).await;
    assert_eq!(status, StatusCode::OK, "{state}");
    for tenant in ["acme", "beta"] {
        world.emit(tenant, "held", json!({})).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(world.receiver.received().len(), 0);
    let cells = api.get("/cells").await;
    assert!(
        cells["data"]
            .as_array()
            .expect("a list")
            .iter()
            .all(|cell| cell["sending_stopped"] == true)
    );
    let (status, _) = api
        .call(Method::PUT, "/sending", Some(json!({ "stopped": false })))
        .await;
    assert_eq!(status, StatusCode::OK);
    for tenant in ["acme", "beta"] {
        api.wait_for_state(tenant, "delivered", 1).await;
    }
    // So is the log level.
    let (status, _) = api
        .call(Method::PUT, "/log-filter", Some(json!({ "filter": "debug" })))
        .await;
    assert_eq!(status, StatusCode::OK);
    let filter = "select filter from postrider.log_filter";
    assert_eq!(world.cell.text(filter).await, "debug");
    assert_eq!(world.home.text(filter).await, "debug");
}
