//! Pages that update themselves, in a real browser: what they show is true, or they say that it is not.

use std::time::Duration;

use reqwest::{Method, StatusCode};
use rustix::process::Signal;
use serde_json::json;

use crate::event_pages::customer;
use crate::support::{Answer, Api, Browser, Database, Form, Person, Postrider, Receiver, until};

/// More than the connections that a browser opens to one site.
const TABS: usize = 8;

#[tokio::test]
async fn pages_in_the_background_hold_no_connection_and_are_true_again_in_front() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let first = browser.current_tab().await;
    browser.open(&program.url("/")).await;
    for _ in 1..TABS {
        browser.hide(true).await;
        browser.new_tab().await;
        browser.open(&program.url("/")).await;
        browser.see("[data-live] .figures").await;
    }
    browser.read("of 0 attempts").await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    browser.read("of 1 attempt").await;
    browser.to_tab(&first).await;
    let shown = browser.words().await;
    assert!(shown.contains("of 0 attempts"), "nobody looks at it: {shown}");
    browser.hide(false).await;
    browser.read("of 1 attempt").await;

    browser.new_tab().await;
    browser.open(&program.url("/account")).await;
    browser.see("nav.menu").await;
    browser.close().await;
}

/// One failed attempt, and the next is not due for an hour. Returns the delivery's id.
async fn failed_once(api: &Api, receiver: &Receiver) -> String {
    receiver.answer(Answer::Status(500));
    let later = json!({ "retry_schedule": ["0s", "1h", "1h", "1h"] });
    api.acme(&receiver.url("/hook"), later).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    receiver.wait_for(1).await;
    attempted(api, 1).await
}

/// Waits until the only delivery of acme has this many attempts.
async fn attempted(api: &Api, attempts: i64) -> String {
    until("the attempt is recorded", || async {
        let found = api.deliveries("acme", "").await;
        let found = found.first().filter(|one| one["attempt_count"] == attempts)?;
        found["id"].as_str().map(str::to_owned)
    })
    .await
}

async fn replay(api: &Api, id: &str) {
    let path = format!("/tenants/acme/deliveries/{id}/replay");
    let (status, told) = api.call(Method::POST, &path, None).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{told}");
}

#[tokio::test]
async fn a_button_acts_on_what_the_page_shows_after_an_update() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let id = failed_once(&api, &receiver).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url(&format!("/deliveries/{id}"))).await;
    browser.read("Attempt 1").await;

    // Somebody else sends it.
    replay(&api, &id).await;
    browser.read("Attempt 2").await;
    attempted(&api, 2).await;
    browser.press("Send now").await;
    receiver.wait_for(3).await;
    browser.read("Queued: it will be sent").await;
    browser.read("Attempt 3").await;

    receiver.answer(Answer::Status(204));
    attempted(&api, 3).await;
    browser.press("Send now").await;
    browser.see(".state.delivered").await;
    browser.press("Replay").await;
    receiver.wait_for(5).await;
    browser.see(".state.delivered").await;
    browser.read("Attempt 5").await;

    // Nothing is left to happen by itself, but somebody else replays it.
    attempted(&api, 5).await;
    replay(&api, &id).await;
    browser.read("Attempt 6").await;
    browser.close().await;
}

#[tokio::test]
async fn a_click_that_changed_nothing_says_so() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let id = failed_once(&api, &receiver).await;
    let mut person = Person::signed_in(&program).await;
    let path = format!("/deliveries/{id}");
    let (_, page) = person.visit(&path).await;
    let stale = Form::find(&page, "/replay");
    replay(&api, &id).await;
    attempted(&api, 2).await;
    let said = outcome(&mut person, &stale).await;
    assert!(said.contains("it was attempted in the meantime"), "{said}");
    assert_eq!(receiver.count(), 2, "nothing was sent");

    let (_, page) = person.visit(&path).await;
    let fresh = Form::find(&page, "/replay");
    let endpoint = page.split("href=\"/endpoints/").nth(1).expect("a link");
    let endpoint = endpoint.split('"').next().unwrap_or_default().to_owned();
    let (_, page) = person.visit(&format!("/endpoints/{endpoint}")).await;
    let pause = Form::find(&page, "/pause");
    for (form, says) in [
        (&pause, "Endpoint paused."),
        (&pause, "the endpoint was already paused"),
        (&fresh, "it will be sent when the endpoint is resumed"),
        (&fresh, "it was already queued"),
    ] {
        let said = outcome(&mut person, form).await;
        assert!(said.contains(says), "{says}: {said}");
    }
}

/// Submits the form and reads the page that it leads to.
async fn outcome(person: &mut Person<'_>, form: &Form) -> String {
    let answer = person.submit_whole(form).await;
    assert!(answer.status.is_redirection(), "{}", answer.status);
    person.visit(&answer.location).await.1
}

/// Whether the details under attempt 1 are open, have the focus, and are the same as when they were marked.
const READING: &str = "const details = document.querySelector('[data-key=\"1\"] details');
    return [details.open, document.activeElement === details.querySelector('summary'), details.marked === true]";

#[tokio::test]
async fn an_update_keeps_the_focus_and_what_the_reader_opened() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let id = failed_once(&api, &receiver).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url(&format!("/deliveries/{id}"))).await;
    browser.click("[data-key='1'] details summary").await;
    let mark = "document.querySelector('[data-key=\"1\"] details').marked = true";
    browser.script(mark).await;
    replay(&api, &id).await;
    browser.see("[data-key='2']").await;
    assert_eq!(browser.script(READING).await, json!([true, true, true]));

    // Selected text is left alone for as long as it is selected, and the last update is not lost.
    let select = "document.getSelection().selectAllChildren(document.querySelector('[data-key=\"1\"] h3'))";
    browser.script(select).await;
    receiver.answer(Answer::Status(204));
    attempted(&api, 2).await;
    replay(&api, &id).await;
    api.wait_for_state("acme", "delivered", 1).await;
    browser.read("Updates are paused while text is selected").await;
    browser.see(".state.pending").await;
    browser.script("document.getSelection().removeAllRanges()").await;
    browser.see(".state.delivered").await;
    browser.see("[data-key='3']").await;
    let opened = "return document.querySelector('[data-key=\"1\"] details').open";
    assert_eq!(browser.script(opened).await, json!(true));
    browser.close().await;
}

#[tokio::test]
async fn a_page_that_is_cut_off_says_so_until_it_is_true_again() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url("/")).await;
    let is_live = "return document.querySelector('.connection').innerText === ''";
    let cut_off = async || {
        browser.read("Reconnecting…").await;
        browser.read("Last updated").await;
    };
    let back = async || {
        until("the page is live again", || async {
            (browser.script(is_live).await == json!(true)).then_some(())
        })
        .await;
    };
    // The server is there and says nothing.
    program.signal(Signal::STOP);
    cut_off().await;
    for (scheme, rules) in [("light", "all"), ("dark", "color-contrast")] {
        browser.scheme(scheme).await;
        let found = browser.violations(rules).await;
        assert!(found.is_empty(), "{}", found.join("\n\n"));
    }
    program.signal(Signal::CONT);
    back().await;
    program.kill();
    cut_off().await;
    program.restart_in_place().await;
    back().await;
    browser.close().await;
}

#[tokio::test]
async fn a_page_whose_session_ended_says_so_within_seconds() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url("/")).await;
    browser.see("[data-live] .figures").await;
    let mut person = Person::signed_in(&program).await;
    let (status, _) = person.post("/sign-out-everywhere", &[]).await;
    assert!(status.is_redirection());
    let ended = tokio::time::timeout(Duration::from_secs(15), browser.read("Your session has ended."));
    ended.await.expect("within seconds");
    browser.press("Sign in").await;
    browser.see("input[name=password]").await;
    browser.close().await;
}

/// Stops all sending, or resumes it.
async fn put_sending(api: &Api, body: serde_json::Value) {
    let (status, told) = api.call(Method::PUT, "/sending", Some(body)).await;
    assert_eq!(status, StatusCode::OK, "{told}");
}

#[tokio::test]
async fn open_pages_say_that_sending_was_stopped_and_promise_nothing_until_it_is_resumed() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let page = program.url(&format!("/endpoints/{}", endpoint.id));
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&page).await;
    browser.see("h1 .state.active").await;
    browser.read("Attempts are sent as usual.").await;

    let stop = json!({ "stopped": true, "reason": "bad deploy" });
    put_sending(&api, stop).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    // The page is open all the time.
    for part in [
        "All sending is stopped",
        "Reason: bad deploy",
        "sending stopped",
        "On hold",
        "Nothing is sent until sending is resumed.",
    ] {
        browser.read(part).await;
    }
    let words = browser.words().await;
    assert!(!words.contains("Attempts are sent as usual"), "{words}");
    for (scheme, rules) in [("light", "all"), ("dark", "color-contrast")] {
        browser.scheme(scheme).await;
        let found = browser.violations(rules).await;
        assert!(found.is_empty(), "{}", found.join("\n\n"));
    }
    browser.open(&program.url("/endpoints")).await;
    browser.see("td .state.paused").await;
    browser.open(&program.url("/")).await;
    let hint = "return document.querySelector('a.figure[href$=\"state=pending\"] .hint').textContent";
    assert_eq!(
        browser.script(hint).await,
        json!("waiting for a retry or on hold")
    );

    let held = api.deliveries("acme", "").await;
    let held = held[0]["id"].as_str().expect("an id");
    browser.open(&program.url(&format!("/deliveries/{held}"))).await;
    browser
        .read("On hold: it will be sent when sending is resumed")
        .await;
    let event = format!(
        "/events?tenant=acme&event={}",
        api.deliveries("acme", "").await[0]["event"]
            .as_str()
            .expect("an id")
    );
    let list = browser.address().await;
    browser.open(&program.url(&event)).await;
    browser.click("main tbody a").await;
    browser.read("On hold until sending is resumed").await;
    browser.open(&list).await;
    put_sending(&api, json!({ "stopped": false })).await;
    browser.see(".state.delivered").await;
    browser.open(&page).await;
    browser.see("h1 .state.active").await;

    // A paused tenant: its customers learn that nothing is sent, and not whose decision it was.
    let (status, _) = api.call(Method::PUT, "/tenants/acme/pause", None).await;
    assert_eq!(status, StatusCode::OK);
    browser.read("tenant paused").await;
    let mut customer = customer(&program, "acme").await;
    let (_, own) = customer.visit(&format!("/endpoints/{}", endpoint.id)).await;
    assert!(own.contains("sending paused"), "{own}");
    assert!(
        !own.contains("tenant paused") && !own.contains("The tenant"),
        "{own}"
    );
    browser.close().await;
}

/// The states of the rows, from the top.
const STATES: &str = "return [...document.querySelectorAll('[data-part=rows] .state')].map((state) => state.textContent).join()";

#[tokio::test]
async fn lists_of_deliveries_update_their_rows_and_offer_new_ones() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let id = failed_once(&api, &receiver).await;
    let endpoint = api.get(&format!("/tenants/acme/deliveries/{id}")).await["endpoint"].clone();
    let endpoint = endpoint.as_str().expect("an id");
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    // A row that no longer matches stays, with its new state.
    let paths = [
        "/deliveries?state=pending".to_owned(),
        format!("/endpoints/{endpoint}"),
    ];
    for (round, path) in paths.iter().enumerate() {
        receiver.answer(Answer::Status(500));
        let received = receiver.count();
        browser.open(&program.url(path)).await;
        let before = browser.script(STATES).await;
        let before = before.as_str().expect("words").to_owned();
        assert!(!before.is_empty(), "{path}");
        for number in 0..3 {
            let event = json!({ "id": format!("evt_{round}_{number}"), "type": "invoice.paid", "data": {} });
            api.emit("acme", event).await;
        }
        receiver.wait_for(received + 3).await;
        browser.read("3 new deliveries").await;
        assert_eq!(
            browser.script(STATES).await,
            json!(before),
            "no row jumps: {path}"
        );

        receiver.answer(Answer::Status(204));
        let top = browser
            .script("return document.querySelector('[data-part=rows] [data-key]').dataset.key")
            .await;
        replay(&api, top.as_str().expect("an id")).await;
        let rest = before.strip_prefix("pending").expect("it was not delivered");
        let changed = format!("delivered{rest}");
        until("the row shows its new state", || async {
            (browser.script(STATES).await == json!(changed)).then_some(())
        })
        .await;
        browser.press("3 new deliveries").await;
        let more = before.split(',').count() + 3 - usize::from(round == 0);
        until("they are in the list", || async {
            let states = browser.script(STATES).await;
            (states.as_str().expect("words").split(',').count() == more).then_some(())
        })
        .await;
    }
    browser.close().await;
}

#[tokio::test]
async fn a_list_is_followed_within_its_limits_and_its_tenant() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let id = failed_once(&api, &receiver).await;
    api.tenant("globex").await;
    let mut admin = Person::signed_in(&program).await;
    let told = first_event(&mut admin, &format!("/live/deliveries?shown={id}")).await;
    assert!(told.contains(&id) && !told.contains("new deliver"), "{told}");
    let told = first_event(&mut admin, "/live/deliveries?state=pending").await;
    assert!(told.contains("1 new delivery"), "{told}");
    let many = [id.as_str(); 51].join(".");
    for query in [
        "shown=dlv_x".to_owned(),
        format!("shown={many}"),
        "floor=x".to_owned(),
        "tenant=nobody".to_owned(),
    ] {
        let (status, page) = admin.visit(&format!("/live/deliveries?{query}")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{query}: {page}");
    }

    let (_, link) = api.call(Method::POST, "/tenants/globex/portal-links", None).await;
    let link = link["url"].as_str().expect("a url");
    let mut customer = Person::new(&program);
    let path = link.strip_prefix(&program.url("")).expect("a path");
    assert!(customer.visit(path).await.0.is_redirection());
    let told = first_event(&mut customer, &format!("/live/deliveries?shown={id}")).await;
    assert!(!told.contains(&id) && !told.contains("new deliver"), "{told}");
}

/// The first event of a stream.
async fn first_event(person: &mut Person<'_>, path: &str) -> String {
    let mut stream = person.open(path).await;
    assert_eq!(stream.status(), StatusCode::OK, "{path}");
    let mut told = String::new();
    while !told.contains("\n\n") {
        let part = stream.chunk().await.expect("a stream").expect("an event");
        told.push_str(&String::from_utf8_lossy(&part));
    }
    told
}
