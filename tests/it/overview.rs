//! What the overview and an endpoint's page say of what was sent, from the minute statistics.

use std::time::{Duration, Instant};

use postrider_dispatcher::rollup;
use reqwest::{Method, StatusCode};
use serde_json::json;
use sqlx::PgPool;

use crate::support::{Answer, Database, Person, Postrider, Receiver, text_of, until};

#[tokio::test]
async fn what_was_sent_is_counted_and_shown_within_seconds() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let good = api.acme(&receiver.url("/good"), json!({})).await;
    for n in 0..20 {
        api.emit(
            "acme",
            json!({ "id": format!("evt_{n}"), "type": "invoice.paid", "data": {} }),
        )
        .await;
    }
    receiver.wait_for(20).await;
    receiver.answer(Answer::Status(503));
    api.endpoint("acme", &receiver.url("/bad"), json!({ "retry_schedule": ["0s"] }))
        .await;
    api.emit(
        "acme",
        json!({ "id": "evt_dead", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "dead", 1).await;

    let dead = "select coalesce(sum(dead), 0)::bigint from postrider.minute_statistics where endpoint_id = 0";
    until("the dead letter is counted", || async {
        (database.count(dead).await == 1).then_some(())
    })
    .await;
    for (what, of) in [("by all", "endpoint_id = 0"), ("by endpoint", "endpoint_id <> 0")] {
        let from = format!("from postrider.minute_statistics where {of}");
        let delivered = format!("select sum(delivered)::bigint {from}");
        assert_eq!(
            database.count(&delivered).await,
            20,
            "each is counted once, {what}"
        );
        let timed = format!("select (select sum(n) from (select unnest(durations) n {from}) d)::bigint");
        let attempts = format!("select sum(delivered + retried + dead)::bigint {from}");
        assert_eq!(
            database.count(&timed).await,
            database.count(&attempts).await,
            "{what}"
        );
    }

    let mut person = Person::signed_in(&program).await;
    for path in ["/", "/?range=24h", "/?range=7d"] {
        let (status, page) = person.visit(path).await;
        assert_eq!(status, StatusCode::OK);
        for part in ["Dead letters", "/bad", "64 of 64 shards", "<svg class=\"chart\""] {
            assert!(page.contains(part), "{path} has no {part}: {page}");
        }
    }
    let (status, page) = person.visit(&format!("/endpoints/{}", good.id)).await;
    assert_eq!(status, StatusCode::OK);
    assert!(page.contains("of 16") && page.contains("Latency p50"), "{page}");
    let (_, page) = person.visit("/endpoints?state=active").await;
    assert!(page.contains("/good") && page.contains("/bad"), "{page}");
}

#[tokio::test]
async fn a_live_part_comes_as_an_event_and_ends_with_the_program() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let mut person = Person::signed_in(&program).await;
    let mut stream = person.open("/live/overview?range=1h").await;
    let mut told = String::new();
    while !told.contains("\n\n") {
        let part = stream.chunk().await.expect("a stream").expect("an event");
        told.push_str(&String::from_utf8_lossy(&part));
    }
    assert!(
        told.starts_with("data: ") && told.contains("Deliveries per second"),
        "{told}"
    );
    assert!(
        Person::new(&program)
            .visit("/live/overview")
            .await
            .0
            .is_redirection(),
        "not to a stranger"
    );
    let began = Instant::now();
    assert!(program.stop().await.success());
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "an open stream does not hold the stop up"
    );
    while let Ok(Some(_)) = stream.chunk().await {}
}

/// The number under a label, and the hint below it.
fn figure<'p>(page: &'p str, label: &str) -> (&'p str, &'p str) {
    let rest = page
        .split(&format!("<span class=\"label\">{label}</span><strong>"))
        .nth(1)
        .unwrap_or_else(|| panic!("no {label} in {page}"));
    let (number, rest) = rest.split_once("</strong>").expect("a number");
    let hint = rest.split_once("<span class=\"hint\">").expect("a hint").1;
    (number, hint.split("</span>").next().unwrap_or_default())
}

/// The badge beside the URL in the title of an endpoint's page.
fn badge(page: &str) -> &str {
    let title = page.split("<h1").nth(1).expect("a title");
    let badge = title.split("<span class=\"state ").nth(1).expect("a badge");
    badge.split('"').next().unwrap_or_default()
}

#[tokio::test]
async fn the_failure_rate_counts_every_attempt_of_the_period() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    database
        .execute(
            "insert into postrider.minute_statistics
                (endpoint_id, minute, writer, delivered, retried, dead, any_failed, classes, durations)
             select e.id, date_trunc('minute', clock_timestamp(), 'UTC') - make_interval(mins => m.ago),
                    gen_random_uuid(), m.delivered, m.retried, 0, m.retried > 0, '{}', '{}'
             from postrider.endpoints e, (values (3, 0, 1), (4, 150, 0), (5, 49, 0)) m (ago, delivered, retried)",
        )
        .await;
    let mut person = Person::signed_in(&program).await;
    for path in ["/", "/?range=24h", "/?range=7d"] {
        let (_, page) = person.visit(path).await;
        let rate = page.split("data-label=\"Failure rate\">").nth(1);
        let rate = rate.expect("a failing endpoint").split('<').next();
        assert_eq!(rate, Some("0.5%"), "1 of 200: {path}");
    }
}

#[tokio::test]
async fn what_is_pending_is_counted_and_what_is_on_hold_says_so() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let (_, link) = api.call(Method::POST, "/tenants/acme/portal-links", None).await;
    let link = link["url"].as_str().expect("a url");
    let mut customer = Person::new(&program);
    customer
        .visit(link.strip_prefix(&program.url("")).expect("a path"))
        .await;
    let mut person = Person::signed_in(&program).await;
    let path = format!("/endpoints/{}", endpoint.id);
    let (_, page) = person.visit(&path).await;
    assert_eq!(badge(&page), "active");
    assert_eq!(figure(&page, "Pending"), ("0", "no backlog"));

    person.post(&format!("{path}/pause"), &[]).await;
    for _ in 0..5 {
        api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
            .await;
    }
    let (_, page) = person.visit(&path).await;
    assert_eq!(badge(&page), "paused");
    assert_eq!(
        figure(&page, "On hold"),
        ("5", "sent when the endpoint is resumed")
    );
    assert!(!page.contains("Attempts are sent as usual"), "{page}");
    for reader in [&mut person, &mut customer] {
        assert_eq!(figure(&reader.visit("/").await.1, "Pending").0, "5");
    }
    let held = api.deliveries("acme", "").await;
    let delivery = format!("/deliveries/{}", held[0]["id"].as_str().expect("an id"));
    let (_, page) = person.visit(&delivery).await;
    assert!(
        page.contains("On hold: it will be sent when the endpoint is resumed"),
        "{page}"
    );

    person.post(&format!("{path}/resume"), &[]).await;
    api.wait_for_state("acme", "delivered", 5).await;
    for reader in [&mut person, &mut customer] {
        let (_, page) = reader.visit("/").await;
        assert_eq!(figure(&page, "Pending"), ("0", "no backlog"));
    }

    // Neither estimated nor stuck: there are more than are counted.
    person.post(&format!("{path}/pause"), &[]).await;
    database
        .execute("select postrider.emit('acme', 'invoice.paid', '{}') from generate_series(1, 5001)")
        .await;
    let (_, page) = person.visit(&path).await;
    assert_eq!(figure(&page, "On hold").0, "5,000+");
    let (_, page) = person.visit("/").await;
    assert!(figure(&page, "Pending").0.starts_with("about "), "{page}");
}

#[tokio::test]
async fn an_endpoint_that_only_fails_is_not_shown_as_active() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(401));
    let api = program.api();
    let once = json!({ "retry_schedule": ["0s"] });
    let endpoint = api.acme(&receiver.url("/hook"), once).await;
    let mut person = Person::signed_in(&program).await;
    let path = format!("/endpoints/{}", endpoint.id);
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    api.wait_for_state("acme", "dead", 1).await;
    let cookie = person.cookie();
    let shown = async |badge_class: &str| {
        until("the badge changes", || async {
            let (_, page) = Person::with_cookie(&program, &cookie).visit(&path).await;
            (badge(&page) == badge_class).then_some(())
        })
        .await;
    };
    shown("late").await;
    for page in [
        path.clone(),
        format!("{path}/secrets"),
        format!("{path}/settings"),
    ] {
        assert_eq!(badge(&person.visit(&page).await.1), "late", "{page}");
    }
    // Ten failures in a row.
    for _ in 0..9 {
        api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
            .await;
    }
    api.wait_for_state("acme", "dead", 10).await;
    shown("open").await;
}

/// Endpoint, delivered, retried, classes, durations.
type HourRow = (i32, i32, i32, Vec<i32>, Vec<i32>);

#[tokio::test]
async fn hours_are_made_of_minutes_and_making_them_again_changes_nothing() {
    let database = Database::fresh().await;
    let _program = Postrider::start(&database).await;
    database
        .execute(
        "insert into postrider.minute_statistics
            (endpoint_id, minute, writer, delivered, retried, dead, any_failed, classes, durations)
         select e, date_trunc('hour', clock_timestamp(), 'UTC') - interval '1 hour' + make_interval(mins => m),
                gen_random_uuid(), 2, 1, 0, true, '{2,0,0,1}', '{1,2}'
         from generate_series(0, 1) e, generate_series(0, 59, 20) m, generate_series(1, 2) writer",
    )
    .await;
    let pool = PgPool::connect_with(database.options()).await.expect("a pool");
    for _ in 0..2 {
        rollup::run(&pool).await.expect("hours");
        let hours: Vec<HourRow> = sqlx::query_as(
            "select endpoint_id, delivered, retried, classes, durations from postrider.hour_statistics
             where endpoint_id <= 1 order by endpoint_id",
        )
        .fetch_all(&pool)
        .await
        .expect("hours");
        let hour = |endpoint| (endpoint, 12, 6, vec![12, 0, 0, 6], vec![6, 12]);
        assert_eq!(hours, [hour(0), hour(1)]);
    }
}

/// Made by a clock that was ahead, it says nothing about what is missing before it.
#[tokio::test]
async fn an_hour_from_the_future_does_not_keep_others_from_being_made() {
    let database = Database::fresh().await;
    database
        .execute(
            "insert into postrider.hour_statistics values
                (0, date_trunc('hour', clock_timestamp(), 'UTC') + interval '40 hours', 1, 0, 0, '{1}', '{1}');
             insert into postrider.minute_statistics
                (endpoint_id, minute, writer, delivered, retried, dead, any_failed, classes, durations)
             values (0, date_trunc('hour', clock_timestamp(), 'UTC') - interval '30 minutes', gen_random_uuid(),
                     7, 0, 0, false, '{7}', '{7}')",
        )
        .await;
    let pool = PgPool::connect_with(database.options()).await.expect("a pool");
    rollup::run(&pool).await.expect("hours");
    let made = "select coalesce(sum(delivered), 0)::bigint from postrider.hour_statistics where hour < clock_timestamp()";
    assert_eq!(database.count(made).await, 7);
}

#[tokio::test]
async fn the_checklist_is_for_the_team_ignores_the_demo_and_ends_after_a_week() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.tenant("demo").await;
    api.event_type("demo.invoice.paid").await;
    api.endpoint("demo", &receiver.url("/demo"), json!({})).await;
    api.emit("demo", json!({ "type": "demo.invoice.paid", "data": {} }))
        .await;
    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin.visit("/").await;
    assert!(
        page.contains("0 of 5 done") && page.contains("/event-types/new-type"),
        "{page}"
    );
    let (_, made) = admin
        .post_and_follow("/people", &[("login", "looker"), ("role", "read-only")])
        .await;
    let mut looker = Person::new(&program);
    let password = text_of(&made, "new-password");
    assert!(looker.sign_in_as("looker", &password).await.is_redirection());
    let (_, page) = looker.visit("/").await;
    assert!(
        page.contains("0 of 5 done") && !page.contains("/event-types/new-type"),
        "{page}"
    );

    api.acme(&receiver.url("/acme"), json!({})).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let (_, page) = admin.visit("/").await;
    assert!(page.contains("4 of 5 done"), "{page}");
    database
        .execute("update postrider.tenants set created_at = created_at - interval '8 days'")
        .await;
    let (_, page) = admin.visit("/").await;
    assert!(!page.contains("Get started"), "{page}");
}
