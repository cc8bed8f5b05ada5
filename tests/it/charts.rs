//! Charts and counters lead to the deliveries that they count, in a real browser.

use reqwest::Method;
use serde_json::{Value, json};

use crate::{
    event_pages::customer,
    support::{Answer, Browser, Database, Person, Postrider, Receiver},
};

/// The links of the bars that count something, with what they count.
const BARS: &str = "return [...document.querySelectorAll('svg.chart a')]
    .map((bar) => [bar.getAttribute('href'), bar.querySelector('title').textContent])
    .filter(([, title]) => /[1-9]/.test(title.split(': ')[1]))";

/// The events of the deliveries listed, in the order of their ids.
const LISTED: &str = "return [...document.querySelectorAll('main tbody .id')].map((one) => one.title).sort()";

async fn listed(browser: &Browser, program: &Postrider, page: &str) -> Value {
    browser.open(&program.url(page)).await;
    browser.script(LISTED).await
}

#[tokio::test]
async fn bars_and_failures_lead_to_the_deliveries_that_were_attempted_then() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let schedule = json!({ "retry_schedule": ["0s", "10ms"] });
    let endpoint = api.acme(&receiver.url("/hook"), schedule).await;
    // Both fail first, and both arrive.
    receiver.script([500, 204, 503, 204].map(Answer::Status));
    for (count, id) in ["new-1", "new-2"].iter().enumerate() {
        let event = json!({ "id": id, "type": "invoice.paid", "data": {} });
        api.emit("acme", event).await;
        api.wait_for_state("acme", "delivered", count + 1).await;
    }
    // One that was attempted ten minutes ago, long after its event was created.
    database
        .execute(
            "with old as (
                 insert into postrider.events (id, tenant_id, type_id, schema_id, chosen_id, body)
                 select postrider.uuid_at(now() - interval '30 minutes'), tenant_id, type_id, schema_id, 'old', body
                 from postrider.events limit 1 returning id, tenant_id, type_id)
             insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                 outcome, status, final)
             select o.id, e.id, 1, o.tenant_id, o.type_id, date_trunc('minute', now(), 'UTC') - interval '595 seconds', 1,
                 1, 204, 'delivered'
             from old o, postrider.endpoints e;
             insert into postrider.minute_statistics (endpoint_id, minute, writer, delivered, retried, dead, any_failed,
                 classes, durations)
             values (0, date_trunc('minute', now(), 'UTC') - interval '10 minutes', gen_random_uuid(), 1, 0, 0,
                 false, array_fill(0, array[11]), array_fill(0, array[29]))",
        )
        .await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let (mut seen, mut failed) = (Vec::new(), 0);
    let bars = browser.script(BARS).await;
    for bar in bars.as_array().expect("bars") {
        let (link, title) = (
            bar[0].as_str().expect("a link"),
            bar[1].as_str().expect("a title"),
        );
        let ids = listed(&browser, &program, link).await;
        let delivered = title
            .split(": ")
            .nth(1)
            .and_then(|counts| counts.split(' ').next());
        assert!(
            ids.as_array().is_some_and(|ids| !ids.is_empty()),
            "{title}: {ids}"
        );
        if seen.is_empty() {
            assert_eq!(ids, json!(["old"]), "{title}");
            assert_eq!(delivered, Some("1"), "{title}");
        } else {
            assert!(!ids.to_string().contains("old"), "{title}: {ids}");
        }
        seen.push(ids);
    }
    assert!(seen.len() >= 2, "{bars}");

    // A failed attempt is counted although a later one succeeded, and so it is listed.
    browser
        .open(&program.url(&format!("/endpoints/{}", endpoint.id)))
        .await;
    let shares = "return [...document.querySelectorAll('.share')].map((one) =>
        [one.querySelector('a').getAttribute('href'), one.querySelector('.number').textContent])";
    for share in browser.script(shares).await.as_array().expect("shares") {
        let link = share[0].as_str().expect("a link");
        assert!(
            link.contains("failure=5xx") && link.contains("attempted_since="),
            "{link}"
        );
        failed += share[1]
            .as_str()
            .expect("a number")
            .parse::<usize>()
            .expect("a number");
        assert_eq!(listed(&browser, &program, link).await, json!(["new-1", "new-2"]));
        browser
            .read("failed in this way, also if a later one succeeded")
            .await;
        assert_eq!(browser.violations("all").await, Vec::<String>::new());
    }
    assert_eq!(failed, 2);

    // The same from the overview, and nothing outside the time asked for.
    browser.open(&program.url("/")).await;
    browser.click("td[data-label=Failed] a").await;
    browser.read("new-2").await;
    assert_eq!(browser.script(LISTED).await, json!(["new-1", "new-2"]));
    let before = "/deliveries?failure=any&attempted_until=2026-01-01T00:00:00Z";
    assert_eq!(listed(&browser, &program, before).await, json!([]));
    browser
        .open(&program.url("/deliveries?attempted_since=yesterday"))
        .await;
    browser.see("input[name=attempted_since][aria-invalid]").await;
    browser.close().await;
}

/// The rows of a list of deliveries.
fn rows(page: &str) -> usize {
    page.matches("<tr data-key=").count()
}

#[tokio::test]
async fn failures_alike_lead_to_those_that_were_counted_and_no_others() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.decide(|request| match request.path.as_str() {
        "/rejects" => Answer::Status(503),
        _ => Answer::HangUp,
    });
    let api = program.api();
    let once = json!({ "retry_schedule": ["0s"] });
    let rejects = api.acme(&receiver.url("/rejects"), once.clone()).await;
    let breaks = api.endpoint("acme", &receiver.url("/breaks"), once).await;
    for _ in 0..5 {
        api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
            .await;
    }
    let dead = api.wait_for_state("acme", "dead", 10).await;
    let of = |endpoint: &str| -> Vec<&str> {
        let found = dead.iter().filter(|one| one["endpoint"] == endpoint);
        found.filter_map(|one| one["id"].as_str()).collect()
    };
    let (rejected, broken) = (of(&rejects.id), of(&breaks.id));
    // The same has happened to discarded ones, but they are not counted: nothing is left to do about them.
    for id in &rejected[..2] {
        let path = format!("/tenants/acme/deliveries/{id}/discard");
        let (status, told) = api.call(Method::POST, &path, None).await;
        assert!(status.is_success(), "{told}");
    }
    let mut person = Person::signed_in(&program).await;
    for (id, others) in [(rejected[4], 2), (broken[4], 4)] {
        let (_, page) = person.visit(&format!("/deliveries/{id}")).await;
        let told = format!("{others} other deliveries of this endpoint failed the same way");
        let (_, after) = page.split_once(&told).unwrap_or_else(|| panic!("{told}: {page}"));
        let link = after
            .split("href=\"")
            .nth(1)
            .and_then(|rest| rest.split('"').next());
        let link = link.expect("a link").replace("&#38;", "&");
        assert!(link.contains("&failure=") && link.contains("&since="), "{link}");
        let (status, page) = person.visit(&link).await;
        assert!(status.is_success() && page.contains(id), "{link}: {page}");
        assert_eq!(rows(&page), others + 1, "{link}: {page}");
    }
}

/// An attempt in the second half of an hour whose minutes have been aggregated.
const AGGREGATED: &str = "
    with at as (select date_trunc('hour', now(), 'UTC') - interval '3 hours' as hour),
    old as (
        insert into postrider.events (id, tenant_id, type_id, schema_id, chosen_id, body)
        select postrider.uuid_at(hour + interval '45 minutes'), tenant_id, type_id, schema_id, 'old', body
        from at, postrider.events limit 1 returning id, tenant_id, type_id),
    attempt as (
        insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
            outcome, status, final)
        select o.id, e.id, 1, o.tenant_id, o.type_id, hour + interval '46 minutes', 1, 1, 204, 'delivered'
        from at, old o, postrider.endpoints e)
    insert into postrider.hour_statistics (endpoint_id, hour, delivered, retried, dead, classes, durations)
    select e.id, hour, 1, 0, 0, array_fill(0, array[11]), array_fill(0, array[29])
    from at, (select 0 as id union all select id from postrider.endpoints) e";

#[tokio::test]
async fn a_bar_of_a_whole_hour_leads_to_the_deliveries_of_all_of_it() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let event = json!({ "id": "new", "type": "invoice.paid", "data": {} });
    api.emit("acme", event).await;
    api.wait_for_state("acme", "delivered", 1).await;
    database.execute(AGGREGATED).await;
    for mut person in [
        customer(&program, "acme").await,
        Person::signed_in(&program).await,
    ] {
        let (_, page) = person.visit("/?range=24h").await;
        let mut bars = page.split("<a href=\"/deliveries?attempted_since=").skip(1);
        let bar = bars.find(|bar| bar.contains(": 1 delivered"));
        let link = bar.and_then(|bar| bar.split('"').next()).expect("a bar");
        let link = format!("/deliveries?attempted_since={}", link.replace("&amp;", "&"));
        let (_, list) = person.visit(&link).await;
        assert_eq!(
            (rows(&list), list.contains("title=\"old\"")),
            (1, true),
            "{link}: {list}"
        );
    }
}
