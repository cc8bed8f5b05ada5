//! The switches of an installation: stop all sending, pause a tenant, start paused, change the log filter.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Database, Fleet, Form, Person, Postrider, Receiver, tool, until};

/// A request that is not of the test's own endpoint tells that dispatchers have read and sent everything before it.
async fn emit(program: &Postrider, tenant: &str, id: &str) {
    let event = json!({ "id": id, "type": "invoice.paid", "data": {} });
    assert_eq!(
        program.api().emit(tenant, event).await.0,
        StatusCode::ACCEPTED,
        "{id}"
    );
}

async fn put_sending(program: &Postrider, body: Value) -> Value {
    let (status, state) = program.api().call(Method::PUT, "/sending", Some(body)).await;
    assert_eq!(status, StatusCode::OK, "{state}");
    state
}

async fn actions(database: &Database) -> Vec<String> {
    let list = "select coalesce(string_agg(action, ' ' order by id), '') from postrider.audit
                where action like 'sending.%' or action in ('tenant.paused', 'tenant.resumed')";
    database
        .text(list)
        .await
        .split_whitespace()
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn nothing_is_sent_while_sending_is_stopped_and_everything_afterwards() {
    let mut fleet = Fleet::start(2).await;
    let receiver = Receiver::start().await;
    for number in 0..8 {
        fleet
            .endpoint(&receiver.url(&format!("/{number}")), json!({}))
            .await;
    }
    fleet.emit("invoice.paid", "before", 5).await;
    receiver.wait_for(5 * 8).await;
    let reason = json!({ "stopped": true, "reason": "bad deploy" });
    let (status, state) = fleet.api().call(Method::PUT, "/sending", Some(reason)).await;
    assert_eq!(status, StatusCode::OK, "{state}");
    assert_eq!(
        (&state["stopped"], &state["restored"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(state["reason"], "bad deploy");

    // Confirmed by both dispatchers: what is emitted now is queued, also for one that starts later.
    fleet.emit("invoice.paid", "meanwhile", 5).await;
    fleet.add().await;
    fleet.balanced().await;
    let waiting = "select count(*) from postrider.queue";
    assert_eq!(fleet.database().count(waiting).await, 5 * 8);
    assert_eq!(receiver.count(), 5 * 8);

    let (status, state) = fleet
        .api()
        .call(Method::PUT, "/sending", Some(json!({ "stopped": false })))
        .await;
    assert_eq!((status, &state["stopped"]), (StatusCode::OK, &json!(false)));
    receiver.wait_for(2 * 5 * 8).await;
    fleet.database().drained().await;
    assert_eq!(receiver.count(), 2 * 5 * 8, "each is sent once");
    assert_eq!(
        actions(fleet.database()).await,
        ["sending.stopped", "sending.resumed"]
    );
}

#[tokio::test]
async fn retries_that_become_due_while_sending_is_stopped_are_kept() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.script([crate::support::Answer::Status(500)]);
    let soon = json!({ "retry_schedule": ["0s", "300ms"] });
    program.api().acme(&receiver.url("/hook"), soon).await;
    emit(&program, "acme", "one").await;
    receiver.wait_for(1).await;
    put_sending(&program, json!({ "stopped": true })).await;
    until("the retry is due", || async {
        let due =
            "select count(*) from postrider.retries where due_at < clock_timestamp() - interval '1 second'";
        (database.count(due).await == 1).then_some(())
    })
    .await;
    assert_eq!(receiver.count(), 1);
    put_sending(&program, json!({ "stopped": false })).await;
    receiver.wait_for(2).await;
    program.api().wait_for_state("acme", "delivered", 1).await;
}

#[tokio::test]
async fn a_stop_is_shown_on_every_page_in_the_metrics_and_by_the_command() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let endpoint = program.api().acme(&receiver.url("/hook"), json!({})).await;
    let stopped = tool(
        &program,
        &["sending", "stop", "--reason", "an incident", "--json"],
    )
    .await;
    assert_eq!(stopped.status, 0, "{stopped:?}");
    assert_eq!(stopped.json()["stopped"], true);
    let status = tool(&program, &["sending", "status"]).await;
    assert!(status.out.starts_with("stopped by key:"), "{status:?}");

    let mut admin = Person::signed_in(&program).await;
    for path in ["/", "/endpoints", "/tenants", "/deliveries", "/system", "/audit"] {
        let (_, page) = admin.visit(path).await;
        assert!(page.contains("All sending is stopped by"), "{path}");
        assert!(page.contains("Reason: an incident"), "{path}");
    }
    let test = format!("/tenants/acme/endpoints/{}/test", endpoint.id);
    let (status, problem) = program.api().call(Method::POST, &test, Some(json!({}))).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    assert_eq!(problem["type"], "urn:postrider:problem:sending-stopped");
    until("the metric tells it", || async {
        let metrics = crate::support::http_client()
            .build()
            .expect("a client")
            .get(program.url("/metrics"))
            .bearer_auth(crate::support::ADMIN_API_KEY)
            .send()
            .await
            .expect("an answer");
        let text = metrics.text().await.expect("a body");
        text.contains("postrider_sending_stopped 1").then_some(())
    })
    .await;

    let (_, page) = admin.visit("/system").await;
    let (_, page) = admin
        .submit_and_follow(&Form::find(&page, "/system/resume-sending"))
        .await;
    assert!(page.contains("Sending resumed") && !page.contains("All sending is stopped"));
    let (_, page) = admin
        .submit_and_follow(&Form::find(&page, "/system/stop-sending"))
        .await;
    assert!(page.contains("All sending is stopped by person:admin"));
    let resumed = tool(&program, &["sending", "resume"]).await;
    assert_eq!(resumed.out.trim(), "sending", "{resumed:?}");
    assert_eq!(
        actions(&database).await,
        [
            "sending.stopped",
            "sending.resumed",
            "sending.stopped",
            "sending.resumed"
        ]
    );
}

#[tokio::test]
async fn a_second_stop_keeps_who_stopped_first_and_why() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let first = put_sending(&program, json!({ "stopped": true })).await;
    let reasons = [
        ("bad deploy", "bad deploy"),
        ("", "bad deploy"),
        ("something else", "bad deploy"),
    ];
    for (given, kept) in reasons {
        let state = put_sending(&program, json!({ "stopped": true, "reason": given })).await;
        assert_eq!(state["reason"], kept, "{given:?}");
        for name in ["stopped_at", "stopped_by"] {
            assert_eq!(state[name], first[name], "{given:?}");
        }
    }
    let told = tool(&program, &["sending", "stop", "--reason", "a drill"]).await;
    assert!(told.status == 0 && told.out.contains("bad deploy"), "{told:?}");
    let recorded =
        "select string_agg(coalesce(detail ->> 'reason', '-'), ', ' order by id) from postrider.audit
                    where action = 'sending.stopped'";
    assert_eq!(
        database.text(recorded).await,
        "-, bad deploy, -, something else, a drill"
    );
    put_sending(&program, json!({ "stopped": false })).await;
    let again = put_sending(&program, json!({ "stopped": true, "reason": "a drill" })).await;
    assert_eq!(again["reason"], "a drill");

    program.api().tenant("acme").await;
    let pause = async |reason: &str| {
        let body = Some(json!({ "reason": reason }));
        program
            .api()
            .call(Method::PUT, "/tenants/acme/pause", body)
            .await
            .1
    };
    let first = pause("unpaid").await;
    let second = pause("a drill").await;
    for name in ["paused_at", "pause_reason"] {
        assert_eq!(second[name], first[name]);
    }
    program
        .api()
        .call(Method::DELETE, "/tenants/acme/pause", None)
        .await;
    assert_eq!(pause("a drill").await["pause_reason"], "a drill");
}

#[tokio::test]
async fn a_paused_tenant_is_sent_nothing_and_others_are() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/acme"), json!({})).await;
    api.tenant("globex").await;
    api.endpoint("globex", &receiver.url("/globex"), json!({})).await;
    emit(&program, "acme", "first").await;
    receiver.wait_for(1).await;
    let paused = tool(
        &program,
        &["tenants", "pause", "acme", "--reason", "unpaid", "--json"],
    )
    .await;
    assert_eq!(paused.status, 0, "{paused:?}");
    assert_eq!(paused.json()["pause_reason"], "unpaid");

    emit(&program, "acme", "held").await;
    // An endpoint that is new is paused, too.
    api.endpoint("acme", &receiver.url("/acme-new"), json!({})).await;
    emit(&program, "acme", "held-twice").await;
    emit(&program, "globex", "other").await;
    receiver.wait_for(2).await;
    assert_eq!(receiver.received()[1].path, "/globex");
    until("only the paused tenant's events are queued", || async {
        let queued = "select count(*) from postrider.queue";
        (database.count(queued).await == 3).then_some(())
    })
    .await;

    let mut admin = Person::signed_in(&program).await;
    let path = format!("/endpoints/{}", endpoint.id);
    for (path, shown) in [
        ("/tenants/acme", "Reason: unpaid"),
        (path.as_str(), "The tenant is paused."),
    ] {
        let (_, page) = admin.visit(path).await;
        assert!(page.contains(shown), "{path}");
    }
    let (_, link) = api.call(Method::POST, "/tenants/acme/portal-links", None).await;
    let url = url::Url::parse(link["url"].as_str().expect("a url")).expect("a url");
    let mut customer = Person::new(&program);
    let portal = format!("{}?{}", url.path(), url.query().expect("a token"));
    customer.visit(&portal).await;
    let (_, page) = customer.visit("/endpoints").await;
    assert!(page.contains("Sending is paused by the operator") && !page.contains("unpaid"));

    let (_, page) = admin.visit("/tenants/acme").await;
    let (_, page) = admin
        .submit_and_follow(&Form::find(&page, "/tenants/acme/resume"))
        .await;
    assert!(page.contains("Tenant resumed") && !page.contains("Paused since"));
    receiver.wait_for(5).await;
    database.drained().await;
    assert_eq!(receiver.count(), 5);
    assert_eq!(actions(&database).await, ["tenant.paused", "tenant.resumed"]);
    let (status, _) = api.call(Method::PUT, "/tenants/nobody/pause", None).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_paused_tenant_gets_no_tests_and_no_probes_and_its_endpoints_are_listed_as_paused() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/acme"), json!({})).await;
    api.tenant("globex").await;
    let other = api.endpoint("globex", &receiver.url("/globex"), json!({})).await;
    let key = json!({ "role": "tenant", "tenant": "acme", "name": "own" });
    let (_, made) = api.call(Method::POST, "/api-keys", Some(key)).await;
    let own = program.api_with_key(made["key"].as_str().expect("a key"));
    let (status, _) = api.call(Method::PUT, "/tenants/acme/pause", None).await;
    assert_eq!(status, StatusCode::OK);

    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    for caller in [&api, &own] {
        for trial in ["test", "probe"] {
            let (status, problem) = caller
                .call(Method::POST, &format!("{path}/{trial}"), Some(json!({})))
                .await;
            assert_eq!(status, StatusCode::CONFLICT, "{trial}: {problem}");
            assert_eq!(problem["type"], "urn:postrider:problem:tenant-paused", "{trial}");
        }
        let shown = caller.get(&path).await;
        assert_eq!(
            (&shown["enabled"], &shown["health"]["status"]),
            (&json!(true), &json!("paused")),
            "{shown}"
        );
    }
    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin.visit(&format!("/endpoints/{}", endpoint.id)).await;
    for trial in ["test", "probe"] {
        let form = Form::find(&page, &format!("/endpoints/{}/{trial}", endpoint.id));
        let (status, told) = admin.submit(&form).await;
        assert_eq!(status, StatusCode::CONFLICT, "{trial}");
        assert!(told.contains("paused by the operator"), "{trial}: {told}");
    }
    assert_eq!(receiver.count(), 0, "nothing was sent");
    for (health, expected) in [("paused", &endpoint.id), ("healthy", &other.id)] {
        let list = api.get(&format!("/endpoints?health={health}")).await;
        assert_eq!(list["data"].as_array().map(Vec::len), Some(1), "{health}: {list}");
        assert_eq!(list["data"][0]["id"], json!(expected), "{health}");
    }

    let (status, _) = api.call(Method::DELETE, "/tenants/acme/pause", None).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    assert_eq!(api.get(&path).await["health"]["status"], "healthy");
    let (status, told) = own
        .call(Method::POST, &format!("{path}/test"), Some(json!({})))
        .await;
    assert_eq!(status, StatusCode::OK, "{told}");
    receiver.wait_for(1).await;
}

#[tokio::test]
async fn a_tenant_key_can_not_end_a_pause() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    let (status, _) = program.api().call(Method::PUT, "/tenants/acme/pause", None).await;
    assert_eq!(status, StatusCode::OK);
    let body = json!({ "role": "tenant", "tenant": "acme", "name": "own" });
    let (_, made) = program.api().call(Method::POST, "/api-keys", Some(body)).await;
    let own = program.api_with_key(made["key"].as_str().expect("a key"));
    let (status, _) = own.call(Method::DELETE, "/tenants/acme/pause", None).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert!(own.get("/tenants/acme").await["paused_at"].is_string());
    for path in ["/sending", "/log-filter"] {
        assert_eq!(own.call(Method::GET, path, None).await.0, StatusCode::FORBIDDEN);
    }
}

#[tokio::test]
async fn a_dispatcher_that_starts_paused_sends_nothing_until_it_is_resumed() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let endpoint = program.api().acme(&receiver.url("/hook"), json!({})).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let pause = Some(json!({ "enabled": false }));
    program.api().call(Method::PATCH, &path, pause).await;
    emit(&program, "acme", "one").await;
    assert!(program.stop().await.success());

    let program = Postrider::start_with(&database, &[("POSTRIDER_START_PAUSED", "true")]).await;
    let (status, _) = program
        .api()
        .call(Method::PATCH, &path, Some(json!({ "enabled": true })))
        .await;
    assert_eq!(status, StatusCode::OK, "applied by the dispatcher");
    let state = program.api().get("/sending").await;
    assert_eq!(
        (&state["stopped"], &state["stopped_by"]),
        (&json!(true), &json!("postrider"))
    );
    assert_eq!(receiver.count(), 0);
    put_sending(&program, json!({ "stopped": false })).await;
    receiver.wait_for(1).await;
}

#[tokio::test]
async fn the_log_filter_of_a_running_process_can_be_changed() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_LOG", "info")]).await;
    let is_logged = |text: &str| program.log_lines().iter().any(|line| line.contains(text));
    let set = tool(&program, &["log-filter", "info,postrider_dispatcher=trace"]).await;
    assert_eq!(set.status, 0, "{set:?}");
    until("the filter is applied", || async {
        is_logged("the log filter was changed").then_some(())
    })
    .await;
    assert_eq!(
        tool(&program, &["log-filter", "--json"]).await.json()["filter"],
        "info,postrider_dispatcher=trace"
    );
    let bad = tool(&program, &["log-filter", "info=loud=5"]).await;
    assert!(
        bad.status == 1 && bad.err.contains("must be a log filter"),
        "{bad:?}"
    );
    let empty = tool(&program, &["log-filter", ""]).await;
    assert!(
        empty.status == 1 && empty.err.contains("off for no log"),
        "{empty:?}"
    );
    for bad in ["", " ", ",", "info\n", "info\u{7}"] {
        let body = Some(json!({ "filter": bad }));
        let (status, problem) = program.api().call(Method::PUT, "/log-filter", body).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{bad:?}");
        assert_eq!(problem["errors"][0]["pointer"], "/filter", "{bad:?}");
    }
    assert_eq!(
        program.api().get("/log-filter").await["filter"],
        "info,postrider_dispatcher=trace"
    );
    let reset = tool(&program, &["log-filter", "--reset"]).await;
    assert!(reset.out.contains("not set"), "{reset:?}");
}
