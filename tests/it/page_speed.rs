//! Not a test: measures every page after millions of attempts. `make pages` runs it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use reqwest::StatusCode;
use sqlx::PgPool;

use crate::{
    event_pages::customer,
    support::{Crawl, Database, Person, Postrider},
};

/// Unless `POSTRIDER_TEST_ATTEMPTS` says otherwise.
const ATTEMPTS: i64 = 10_000_000;
/// A page with its style, script and font, before compression.
const BYTES_MAX: usize = 150 * 1000;
const TIME_MAX: Duration = Duration::from_millis(50);
/// The median counts.
const VISITS: usize = 7;
const ASSETS: [&str; 4] = [
    "/assets/style.css",
    "/assets/app.js",
    "/assets/inter.woff2",
    "/assets/mark.svg",
];

/// Beside the history: many tenants, dead letters that were discarded, events that no endpoint got.
const MORE: &str = "
    insert into postrider.tenants (slug, name) select 'customer_' || n, 'Customer ' || n from generate_series(1, 20000) n;
    with picked as materialized (
        select d.endpoint_id, d.event_id from postrider.dead_letters d join postrider.tenants t on t.id = d.tenant_id
        where t.slug in ('seed-1', 'seed-2') order by d.event_id limit 2000),
    gone as (
        delete from postrider.dead_letters d using picked p
        where d.endpoint_id = p.endpoint_id and d.event_id = p.event_id
        returning d.endpoint_id, d.event_id, d.type_id, d.reason, d.failure),
    counted as (
        update postrider.dead_letter_counts c set count = c.count - g.count
        from (select endpoint_id, type_id, reason, failure, count(*) from gone group by 1, 2, 3, 4) g
        where c.endpoint_id = g.endpoint_id and c.type_id = g.type_id and c.reason = g.reason and c.failure = g.failure)
    update postrider.attempts a set final = 'discarded' from gone g
    where a.event_id = g.event_id and a.endpoint_id = g.endpoint_id;
    select postrider.emit('customer_7', 'seed.paid', '{}', 'order-' || n) from generate_series(1, 100) n;
    analyze postrider.tenants, postrider.attempts, postrider.dead_letters";

/// Filters that links of other pages do not have, or that once were slow.
const LISTS: [&str; 25] = [
    "/?range=24h",
    "/?range=7d",
    "/deliveries?state=pending",
    "/deliveries?state=delivered",
    "/deliveries?state=dead",
    "/deliveries?state=discarded",
    "/deliveries?tenant=seed-1",
    "/deliveries?tenant=seed-1&state=pending",
    "/deliveries?tenant=seed-1&state=discarded",
    "/deliveries?tenant=seed-5&state=discarded",
    "/deliveries?tenant=seed-1&failure=5xx",
    "/deliveries?failure=tls",
    "/deliveries?status_code=500",
    "/deliveries?failure=any&attempted_until=2020-01-01T00:00:00Z",
    "/deliveries?status_code=299",
    "/deliveries?attempts=2",
    "/deliveries?type=seed.paid&within=1h",
    "/deliveries?tenant=seed-3&type=seed.refunded",
    "/events?tenant=seed-1",
    "/events?deliveries=none",
    "/events?tenant=customer_7&deliveries=none",
    "/search?q=seed-1",
    "/search?q=example.com/hook/3",
    "/search/suggestions?q=order-7",
    "/search?q=order-7",
];

struct Measured {
    bytes: usize,
    median: Duration,
    slowest: Duration,
}

async fn measure(person: &mut Person<'_>, page: &str) -> (Measured, String) {
    let mut times = Vec::new();
    let mut text = String::new();
    for _ in 0..VISITS {
        let began = Instant::now();
        let (status, read) = person.visit(page).await;
        times.push(began.elapsed());
        assert!(
            status == StatusCode::OK || status.is_redirection(),
            "{page}: {status}"
        );
        text = read;
    }
    times.sort();
    let measured = Measured {
        bytes: text.len(),
        median: times[VISITS / 2],
        slowest: times[VISITS - 1],
    };
    (measured, text)
}

fn links(page: &str) -> Vec<String> {
    let links = page.split("href=\"/").skip(1);
    links
        .map(|rest| {
            format!(
                "/{}",
                rest.split('"').next().unwrap_or_default().replace("&amp;", "&")
            )
        })
        .collect()
}

/// All kinds of pages that one can get to by links, and these.
async fn measure_all(person: &mut Person<'_>, who: &str, more: &[&str]) -> BTreeMap<String, Measured> {
    let mut all = BTreeMap::new();
    let mut crawl = Crawl::from(&["/".to_owned()]);
    while let Some(page) = crawl.next() {
        let (measured, text) = measure(person, &page).await;
        crawl.learn(links(&text));
        all.insert(format!("{who} {page}"), measured);
    }
    for page in more {
        all.insert(format!("{who} {page}"), measure(person, page).await.0);
    }
    all
}

#[tokio::test]
#[ignore = "takes a quarter of an hour and ten gigabytes: `make pages` runs it"]
async fn every_page_is_small_and_fast_after_millions_of_attempts() {
    let attempts = std::env::var("POSTRIDER_TEST_ATTEMPTS").ok();
    let attempts = attempts.map_or(ATTEMPTS, |text| text.parse().expect("a number"));
    let database = Database::on_private_server().await;
    let program = Postrider::start(&database).await;
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    postrider_bench::seed::run(&pool, attempts).await.expect("seeded");
    sqlx::raw_sql(MORE).execute(&pool).await.expect("added");
    pool.close().await;
    let mut admin = Person::signed_in(&program).await;
    let mut assets = 0;
    for asset in ASSETS {
        assets += admin.open(asset).await.bytes().await.expect("whole").len();
    }
    let mut all = measure_all(&mut admin, "team", &LISTS).await;
    let mut own = customer(&program, "seed-1").await;
    all.extend(measure_all(&mut own, "customer", &[]).await);
    println!("{attempts} attempts; style, script, font and mark: {assets} bytes\n");
    println!("| page | KB with assets | median ms | slowest of {VISITS}, ms |\n|---|---|---|---|");
    let mut over = Vec::new();
    for (page, one) in &all {
        let bytes = one.bytes + assets;
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        println!(
            "| {page} | {:.0} | {:.1} | {:.1} |",
            bytes as f64 / 1000.0,
            ms(one.median),
            ms(one.slowest)
        );
        if bytes > BYTES_MAX || one.median > TIME_MAX {
            over.push(format!("{page}: {bytes} bytes, {:.1} ms", ms(one.median)));
        }
    }
    assert!(over.is_empty(), "{}", over.join("\n"));
}
