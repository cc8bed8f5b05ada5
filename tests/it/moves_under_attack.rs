//! Moves of tenants between cells when everything else goes on: long transactions, quotas, replays, other moves, cells that are down.

use std::{collections::BTreeSet, time::Duration};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::Connection;

use crate::{
    cells::{emit, endpoint},
    moves::{Producers, World, check, ordered_endpoint},
    support::{Answer, Database, Receiver, until},
};

/// What belongs to a tenant and stays behind on purpose.
const NOT_COPIED: [(&str, &str); 11] = [
    ("api_keys", "written at home, copied to every cell"),
    ("portal_links", "at home"),
    ("sessions", "at home"),
    ("tenant_moves", "at home"),
    ("cell_outbox", "at home: the tenant's events wait there"),
    ("cell_outbox_keys", "at home"),
    ("cell_outbox_refused", "at home"),
    ("cell_quotas_used", "at home"),
    ("erasures", "a deleted tenant does not move"),
    ("audit", "stays where it was written"),
    ("endpoint_activity", "what a dispatcher does at this moment"),
];

#[tokio::test]
async fn every_table_of_a_tenant_is_copied_or_named_here() {
    let database = Database::fresh().await;
    let tables =
        "select string_agg(distinct c.relname, ' ') from pg_class c join pg_attribute a on a.attrelid = c.oid
        where c.relnamespace = 'postrider'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
          and a.attname in ('tenant_id', 'endpoint_id', 'event_id', 'replay_id', 'secret_id')";
    let found = database.text(tables).await;
    let found: BTreeSet<&str> = found.split(' ').collect();
    let mut known: BTreeSet<&str> = postrider_dispatcher::moves::copied_tables().collect();
    for (table, _) in NOT_COPIED {
        assert!(known.insert(table), "{table} is copied, too");
    }
    assert_eq!(found, known);
}

async fn settle(world: &World, what: &str) {
    until(what, || async {
        let left = "select count(*) from postrider.tenant_moves where ended_at is null";
        (world.pair.home.count(left).await == 0).then_some(())
    })
    .await;
}

/// Events that were accepted while the tenant was moving are more than its quota admits.
#[tokio::test(flavor = "multi_thread")]
async fn a_quota_does_not_keep_a_tenant_from_coming_home() {
    let world = World::start().await;
    let (home, cell) = (&world.pair.home, &world.pair.cell);
    let receiver = Receiver::start().await;
    ordered_endpoint(cell, &receiver.url("/hook")).await;
    receiver.answer(Answer::Hold);
    let mut producer = home.producer().await;
    let data = |n: i32| json!({ "n": n }).to_string();
    emit(&mut producer, "acme", &data(0), Some("k0-1"), Some("k0"))
        .await
        .expect("emitted");
    receiver.wait_for(1).await;
    home.execute(
        "update postrider.tenants set emits_per_minute = 3, stored_bytes_max = 400 where slug = 'acme'",
    )
    .await;
    let id = world.begin("home").await;
    for n in 1..300 {
        let id = format!("k0-{}", n + 1);
        emit(&mut producer, "acme", &data(n), Some(&id), Some("k0"))
            .await
            .expect("emitted");
    }
    receiver.answer(Answer::Status(204));
    receiver.release();
    assert_eq!(world.ended(&id).await["state"], "done");
    let received = receiver.wait_for(300).await;
    let order: Vec<Value> = received
        .iter()
        .map(|one| one.field("data")["n"].clone())
        .collect();
    let expected: Vec<Value> = (0..300).map(Value::from).collect();
    assert_eq!(order, expected);
    // It applies to what is emitted from now on.
    let more = emit(&mut producer, "acme", &data(301), None, None).await;
    assert!(
        more.as_ref()
            .is_err_and(|error| error.0 == "PR429" || error.0 == "PR507"),
        "{more:?}"
    );
}

/// Until the source is erased the move is not over.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_and_a_second_move_wait_until_the_first_has_erased_its_source() {
    let mut world = World::start().await;
    let receiver = Receiver::start().await;
    ordered_endpoint(&world.pair.cell, &receiver.url("/hook")).await;
    let producers = Producers::start(&world.pair.home);
    receiver.wait_for(10).await;
    world.move_to("home").await;
    receiver.wait_for(20).await;
    let mut blocker = world.pair.home.connect().await;
    let mut open = blocker.begin().await.expect("begun");
    // Of a table that only the erasure writes to; and without an id, or the move would wait for this transaction before.
    sqlx::raw_sql("lock table postrider.trials in share mode")
        .execute(&mut *open)
        .await
        .expect("locked");
    let id = world.begin("a").await;
    until("it erases", || async {
        (world.state(&id).await["state"] == "erasing").then_some(())
    })
    .await;
    let form = json!({ "tenant": "acme", "to": "home" });
    let (status, problem) = world.api.call(Method::POST, "/moves", Some(form)).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    // Nor does it keep a dispatcher that takes over from going on.
    let (status, _) = world
        .api
        .call(Method::PUT, "/cells/a", Some(json!({ "state": "draining" })))
        .await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    world.dispatcher.kill();
    world.dispatcher.restart().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    open.rollback().await.expect("released");
    assert_eq!(world.ended(&id).await["state"], "done");
    until("it is back, because the cell is drained", || async {
        let there = "select count(*) from postrider.tenants where slug = 'acme' and is_here";
        (world.pair.home.count(there).await == 1).then_some(())
    })
    .await;
    settle(&world, "the moves have ended").await;
    let committed = producers.end().await;
    receiver.wait_for(committed.len()).await;
    let twice = check(&receiver, &committed);
    assert!(twice <= 5, "at most what was in flight: {twice}");
}

/// With every transaction of a producer longer than one attempt to come home waits.
#[tokio::test(flavor = "multi_thread")]
async fn transactions_that_overlap_all_the_time_do_not_keep_a_tenant_from_coming_home() {
    let world = World::start().await;
    let receiver = Receiver::start().await;
    endpoint(&world.pair.cell, "acme", &receiver.url("/hook")).await;
    let stop = tokio_util::sync::CancellationToken::new();
    let producers: Vec<_> = (0..6)
        .map(|number| {
            let (options, stop) = (world.pair.home.options(), stop.clone());
            tokio::spawn(async move {
                let mut connection = sqlx::PgConnection::connect_with(&options)
                    .await
                    .expect("connected");
                tokio::time::sleep(Duration::from_millis(150 * number)).await;
                let mut emitted = 0;
                while !stop.is_cancelled() {
                    let mut open = connection.begin().await.expect("begun");
                    emit(&mut open, "acme", "{}", None, None).await.expect("emitted");
                    tokio::time::sleep(Duration::from_millis(900)).await;
                    open.commit().await.expect("committed");
                    emitted += 1;
                }
                emitted
            })
        })
        .collect();
    receiver.wait_for(5).await;
    world.move_to("home").await;
    stop.cancel();
    let mut emitted = 0;
    for producer in producers {
        emitted += producer.await.expect("ended");
    }
    receiver.wait_for(emitted).await;
    assert_eq!(receiver.count(), emitted, "invented");
}

/// What a change waits for is known by its transaction, whose id means nothing in another database.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_responses_and_deleted_endpoints_move_in_steps_without_ids_of_transactions() {
    let world = World::start().await;
    let (home, cell) = (&world.pair.home, &world.pair.cell);
    cell.execute(
        "insert into postrider.idempotency (scope, fingerprint, status, response, tenant_id, settles_xid, settles_shard)
         select sha256(n::text::bytea), '', 201, convert_to(repeat('x', 2000), 'UTF8'), t.id, '999999999999', 3
         from postrider.tenants t, generate_series(1, 3000) n where t.slug = 'acme';
         insert into postrider.endpoints (public_id, tenant_id, shard, url, state)
         select 'ep_' || n, t.id, 3, 'https://gone.invalid/', 'deleted'
         from postrider.tenants t, generate_series(1, 2500) n where t.slug = 'acme';
         insert into postrider.replays (public_id, tenant_id, kind, rate_per_second, state, asked_by)
         select 'rpl_' || n, t.id, 'deliveries', 1, 'done', 'me'
         from postrider.tenants t, generate_series(1, 30) n where t.slug = 'acme';
         insert into postrider.replay_parts (replay_id, endpoint_id, source, total)
         select r.id, e.id, 'dead', 1 from postrider.replays r, postrider.endpoints e where e.id % 50 = 0",
    )
    .await;
    let parts = cell.count("select count(*) from postrider.replay_parts").await;
    world.move_to("home").await;
    assert_eq!(
        home.count("select count(*) from postrider.idempotency where settles_xid is null")
            .await,
        3000
    );
    assert_eq!(home.count("select count(*) from postrider.endpoints").await, 2500);
    assert_eq!(
        home.count("select count(*) from postrider.replay_parts").await,
        parts
    );
    for table in ["idempotency", "endpoints", "replays", "replay_parts"] {
        let left = cell
            .count(&format!("select count(*) from postrider.{table}"))
            .await;
        assert_eq!(left, 0, "{table}");
    }
}

/// Long transactions whose snapshot is older than the move, bodies of 256 KB, retries that become due meanwhile, emits over HTTP.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_moves_back_and_forth_with_everything_going_on_loses_and_repeats_nothing() {
    let rounds: usize =
        std::env::var("POSTRIDER_TEST_ROUNDS").map_or(4, |text| text.parse().expect("a number"));
    let world = World::start().await;
    let (home, cell) = (&world.pair.home, &world.pair.cell);
    let receiver = Receiver::start().await;
    let id = endpoint(cell, "acme", &receiver.url("/hook")).await;
    cell.execute(&format!(
        "update postrider.endpoints set retry_schedule = array_fill(300, array[50]) where id = {id}"
    ))
    .await;
    let failed = std::sync::Mutex::new(BTreeSet::new());
    receiver.decide(move |request| {
        let id = request.event_id().to_owned();
        let is_new = failed.lock().expect("not poisoned").insert(id.clone());
        match is_new && id.ends_with('3') {
            true => Answer::Status(500),
            false => Answer::After(Duration::from_millis(5), 204),
        }
    });
    let stop = tokio_util::sync::CancellationToken::new();
    let mut producers = Vec::new();
    for number in 0..4 {
        producers.push(tokio::spawn(emit_in_long_snapshots(
            home.options(),
            number,
            stop.clone(),
        )));
    }
    producers.push(tokio::spawn(emit_over_http(world.api.clone(), stop.clone())));
    for round in 0..rounds {
        let before = receiver.count();
        receiver.wait_for(before + 30).await;
        world.move_to(if round % 2 == 0 { "home" } else { "a" }).await;
    }
    stop.cancel();
    let mut committed = BTreeSet::new();
    for producer in producers {
        committed.extend(producer.await.expect("ended"));
    }
    let accepted = |receiver: &Receiver| {
        let mut accepted: Vec<String> = Vec::new();
        let mut tried = BTreeSet::new();
        for request in receiver.received() {
            let id = request.event_id().to_owned();
            if !tried.insert(id.clone()) || !id.ends_with('3') {
                accepted.push(id);
            }
        }
        accepted
    };
    until("all are delivered", || async {
        (accepted(&receiver).len() >= committed.len()).then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let accepted = accepted(&receiver);
    let came: BTreeSet<String> = accepted.iter().cloned().collect();
    assert_eq!(came, committed, "lost or invented");
    assert_eq!(accepted.len(), came.len(), "came twice");
}

/// Every tenth event is large.
fn data(n: usize) -> String {
    let filler = if n.is_multiple_of(10) { 250_000 } else { 10 };
    json!({ "n": n, "filler": "x".repeat(filler) }).to_string()
}

async fn emit_in_long_snapshots(
    home: sqlx::postgres::PgConnectOptions,
    number: usize,
    stop: tokio_util::sync::CancellationToken,
) -> Vec<String> {
    let mut connection = sqlx::PgConnection::connect_with(&home).await.expect("connected");
    let mut committed = Vec::new();
    let mut n = 0;
    while !stop.is_cancelled() {
        let mut open = connection
            .begin_with("begin isolation level repeatable read; select 1")
            .await
            .expect("begun");
        let mut ids = Vec::new();
        for _ in 0..3 {
            n += 1;
            let id = format!("r{number}-{n}");
            match emit(&mut open, "acme", &data(n), Some(&id), None).await {
                Ok(id) => ids.push(id),
                Err((code, message)) => {
                    assert_eq!(code, "40001", "{message}");
                    ids.clear();
                    break;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if ids.is_empty() {
            open.rollback().await.expect("rolled back");
            continue;
        }
        open.commit().await.expect("committed");
        committed.extend(ids);
    }
    committed
}

async fn emit_over_http(api: crate::support::Api, stop: tokio_util::sync::CancellationToken) -> Vec<String> {
    let mut committed = Vec::new();
    let mut n = 0;
    while !stop.is_cancelled() {
        n += 1;
        let id = format!("h-{n}");
        let event = json!({ "type": "invoice.paid", "id": id, "data": { "n": n } });
        // The same twice, as a client does that did not hear the first answer.
        for _ in 0..2 {
            let answer = until("it is stored", || async {
                let (status, _, answer) = api
                    .post_with_key("/tenants/acme/events", &format!("key-{n}"), event.clone())
                    .await;
                (status != StatusCode::SERVICE_UNAVAILABLE).then_some(answer)
            })
            .await;
            assert_eq!(answer["id"], id, "{answer}");
        }
        committed.push(id);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    committed
}

/// A cell that is down keeps nobody from cancelling, nor other moves from going on.
#[tokio::test(flavor = "multi_thread")]
async fn moves_that_are_stuck_leave_their_place_and_a_cancelled_one_frees_its_tenant() {
    let world = World::start().await;
    let (home, cell) = (&world.pair.home, &world.pair.cell);
    let receiver = Receiver::start().await;
    endpoint(cell, "acme", &receiver.url("/hook")).await;
    home.execute(
        "insert into postrider.cells (id, name, url)
         select n, 'down-' || n, c.url from generate_series(2, 7) n, postrider.cells c where c.id = 1;
         update postrider.cells set url = 'unreadable' where id > 1;
         insert into postrider.tenants (slug, cell_id) select 'stuck-' || n, 0 from generate_series(2, 7) n",
    )
    .await;
    for n in 2..=7 {
        let form = json!({ "tenant": format!("stuck-{n}"), "to": format!("down-{n}") });
        let (status, begun) = world.api.call(Method::POST, "/moves", Some(form)).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{begun}");
    }
    world.move_to("home").await;
    let id = home
        .text("select public_id from postrider.tenant_moves order by id limit 1")
        .await;
    let (status, _) = world
        .api
        .call(Method::DELETE, &format!("/moves/{id}"), None)
        .await;
    assert_eq!(status, StatusCode::ACCEPTED);
    let here = "select count(*) from postrider.tenants where slug = 'stuck-2' and is_here";
    until("its tenant goes on", || async {
        (home.count(here).await == 1).then_some(())
    })
    .await;
    let said = "select count(*) from postrider.tenant_moves where waits_for like '%its address%'";
    until("the others say why", || async {
        (home.count(said).await > 0).then_some(())
    })
    .await;
}

/// Not a test: prints how fast rows are copied, and what the mover needs for it.
#[tokio::test(flavor = "multi_thread")]
#[ignore]
async fn how_fast_a_move_copies() {
    let world = World::start().await;
    let (home, cell) = (&world.pair.home, &world.pair.cell);
    let receiver = Receiver::start().await;
    let made = endpoint(cell, "acme", &receiver.url("/hook")).await;
    endpoint(home, "beta", &receiver.url("/beta")).await;
    let large = std::env::var("POSTRIDER_TEST_LARGE").is_ok();
    let (count, body, response) = if large {
        (1_000, 256_000, 16_000)
    } else {
        (50_000, 1_000, 50)
    };
    cell.execute(&format!(
        "insert into postrider.events (id, tenant_id, type_id, schema_id, chosen_id, body)
         select postrider.uuid_at(clock_timestamp()), t.id, y.id, s.id, 'e' || n, convert_to(repeat('x', {body}), 'UTF8')
         from postrider.tenants t, postrider.event_types y, postrider.schemas s, generate_series(1, {count}) n
         where t.slug = 'acme' and y.name = 'invoice.paid' and s.type_id = y.id;
         insert into postrider.event_ids select tenant_id, chosen_id, id, '' from postrider.events;
         insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms, outcome, status,
                                         signature, response_head, response_body, final)
         select id, {made}, 1, tenant_id, type_id, clock_timestamp(), 10, 0, 200, repeat('s', 80), repeat('h', 200),
                convert_to(repeat('b', {response}), 'UTF8'), 'delivered' from postrider.events;
         analyze"
    ))
    .await;
    let stop = tokio_util::sync::CancellationToken::new();
    let others = {
        let (options, stop) = (home.options(), stop.clone());
        tokio::spawn(async move {
            let mut connection = sqlx::PgConnection::connect_with(&options)
                .await
                .expect("connected");
            let mut slowest = Duration::ZERO;
            while !stop.is_cancelled() {
                let began = std::time::Instant::now();
                emit(&mut connection, "beta", "{}", None, None)
                    .await
                    .expect("emitted");
                slowest = slowest.max(began.elapsed());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            slowest
        })
    };
    let began = std::time::Instant::now();
    let id = world.begin("home").await;
    let switched = loop {
        let now = world.state(&id).await;
        if !now["switched_at"].is_null() {
            break began.elapsed();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let ended = world.ended(&id).await;
    stop.cancel();
    let status = std::fs::read_to_string(format!("/proc/{}/status", world.dispatcher.pid())).expect("read");
    let peak = status
        .lines()
        .find(|line| line.starts_with("VmHWM"))
        .unwrap_or_default();
    println!(
        "{} rows, switched after {switched:?}, ended after {:?}; {peak}; slowest emit of another tenant {:?}",
        ended["copied"],
        began.elapsed(),
        others.await.expect("ended"),
    );
}
