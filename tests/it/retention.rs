//! Retention: partitions come and go, nothing that is needed goes with them, and ids are told apart across them.

use std::time::Duration;

use chrono::{TimeDelta, Utc};
use postrider_dispatcher::{partitions, retention, schema};
use reqwest::{Method, StatusCode};
use serde_json::json;
use sqlx::PgPool;

use crate::support::{Answer, Database, Postrider, Receiver, until};

const MONTH: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// A day far behind us, with partitions, into which events are moved as if they had been emitted then.
async fn forty_days_ago(database: &Database) -> i64 {
    let day = (Utc::now() - TimeDelta::days(40)).date_naive();
    let name = day.format("%Y%m%d");
    let next = day.succ_opt().expect("a day");
    for table in ["events", "attempts"] {
        database
            .execute(&format!(
                "create table postrider.{table}_{name} (like postrider.{table} including all);
                 do $$ begin execute format(
                    'alter table postrider.{table} attach partition postrider.{table}_{name} for values from (%L) to (%L)',
                    postrider.uuid_floor('{day}T00:00:00Z'), postrider.uuid_floor('{next}T00:00:00Z')); end $$"
            ))
            .await;
    }
    day.and_hms_opt(12, 0, 0)
        .expect("noon")
        .and_utc()
        .timestamp_millis()
}

/// Gives the event another age everywhere it is named.
async fn age(database: &Database, event: &str, unix_ms: i64) {
    database
        .execute(&format!(
            "do $$
             declare old uuid := (select event_id from postrider.event_ids where id = '{event}');
                     new uuid := (select (lpad(to_hex({unix_ms}), 12, '0') || substr(replace(old::text, '-', ''), 13))::uuid);
             begin
                insert into postrider.events select new, tenant_id, type_id, schema_id, chosen_id, ordering_key, sequence, body, full_data
                from postrider.events where id = old;
                delete from postrider.events where id = old;
                update postrider.event_ids set event_id = new where event_id = old;
                update postrider.attempts set event_id = new where event_id = old;
                update postrider.queue set event_id = new where event_id = old;
                update postrider.retries set event_id = new where event_id = old;
                update postrider.dead_letters set event_id = new where event_id = old;
             end $$"
        ))
        .await;
}

#[tokio::test]
async fn a_day_is_dropped_and_what_is_pending_or_dead_keeps_its_event_and_can_be_replayed() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    receiver.decide(|request| match request.event_id() {
        "delivered" => Answer::Status(204),
        _ => Answer::Status(500),
    });
    let endpoint = api
        .acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    for id in ["delivered", "dead", "expired"] {
        api.emit(
            "acme",
            json!({ "id": id, "type": "invoice.paid", "data": { "n": 1 } }),
        )
        .await;
        database.drained().await;
    }
    api.wait_for_state("acme", "dead", 2).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "enabled": false })))
        .await;
    api.emit(
        "acme",
        json!({ "id": "pending", "type": "invoice.paid", "data": {} }),
    )
    .await;
    program.stop().await;

    let noon = forty_days_ago(&database).await;
    for id in ["delivered", "dead", "expired", "pending"] {
        age(&database, id, noon).await;
    }
    database
        .execute(
            "update postrider.dead_letters set died_at = clock_timestamp() - interval '31 days'
             where event_id = (select event_id from postrider.event_ids where id = 'expired')",
        )
        .await;
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    // Two at once: one does it.
    let (one, two) = tokio::join!(retention::run(&pool, MONTH), retention::run(&pool, MONTH));
    let (one, two) = (one.expect("done"), two.expect("done"));
    assert_eq!(
        one.partitions_dropped + two.partitions_dropped,
        2,
        "{one:?} {two:?}"
    );
    assert_eq!(one.dead_letters_expired + two.dead_letters_expired, 1);
    assert_eq!(
        database
            .count("select count(*) from postrider.archived_events")
            .await,
        2
    );
    assert_eq!(
        database
            .count("select sum(count)::bigint from postrider.dead_letter_counts")
            .await,
        1
    );

    // The program's own duty would forget the dead letter as soon as its replay has arrived.
    let mut alone = database.connect().await;
    sqlx::query("select pg_advisory_lock(hashtext('postrider.retention'))")
        .execute(&mut alone)
        .await
        .expect("locked");
    program.restart().await;
    let api = program.api();
    assert!(api.deliveries("acme", "state=delivered").await.is_empty());
    let dead = api.deliveries("acme", "state=dead").await;
    assert_eq!(dead.len(), 1, "{dead:?}");
    assert_eq!(
        (&dead[0]["event"], &dead[0]["attempt_count"]),
        (&json!("dead"), &json!(1))
    );
    assert_eq!(
        api.get("/tenants/acme/events/dead").await["data"],
        json!({ "n": 1 })
    );
    let known = json!({ "id": "dead", "type": "invoice.paid", "data": { "n": 1 } });
    assert_eq!(
        api.emit("acme", known).await.0,
        StatusCode::OK,
        "held ids are still known"
    );
    let gone = json!({ "id": "delivered", "type": "invoice.paid", "data": { "n": 2 } });
    assert_eq!(
        api.emit("acme", gone).await.0,
        StatusCode::ACCEPTED,
        "a dropped one is free"
    );

    receiver.decide(|_| Answer::Status(204));
    api.call(Method::PATCH, &path, Some(json!({ "enabled": true })))
        .await;
    let id = dead[0]["id"].as_str().expect("an id");
    let (status, replayed) = api
        .call(
            Method::POST,
            &format!("/tenants/acme/deliveries/{id}/replay"),
            None,
        )
        .await;
    assert_eq!(status, StatusCode::ACCEPTED, "{replayed}");
    receiver
        .wait_until("all three", |receiver| {
            let came: Vec<String> = receiver
                .received()
                .iter()
                .map(|r| r.event_id().to_owned())
                .collect();
            came.iter().filter(|id| *id == "dead").count() == 2 && came.contains(&"pending".to_owned())
        })
        .await;
    database.drained().await;
    let seen = api.get(&format!("/tenants/acme/deliveries/{id}")).await;
    assert_eq!(seen["state"], "delivered", "{seen}");
    assert_eq!(seen["attempts"][0]["number"], 2, "{seen}");

    sqlx::Connection::close(alone).await.expect("let go");
    // The program's own duty may be at it: then ours does nothing, and is asked again.
    until("nothing is held", || async {
        retention::run(&pool, MONTH).await.expect("done");
        let left = "select (select count(*) from postrider.archived_events) + (select count(*) from postrider.archived_attempts)
                         + (select count(*) from postrider.dead_letters)";
        (database.count(left).await == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_tenant_may_keep_less_than_the_platform() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let put = |days| {
        api.call(
            Method::PUT,
            "/tenants/acme",
            Some(json!({ "retention_days": days })),
        )
    };
    assert_eq!(
        put(31).await.0,
        StatusCode::UNPROCESSABLE_ENTITY,
        "the platform keeps 30"
    );
    assert_eq!(put(0).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    let (status, tenant) = put(7).await;
    assert_eq!(
        (status, &tenant["retention_days"]),
        (StatusCode::OK, &json!(7)),
        "{tenant}"
    );
    for id in ["old", "new"] {
        api.emit("acme", json!({ "id": id, "type": "invoice.paid", "data": {} }))
            .await;
    }
    api.wait_for_state("acme", "delivered", 2).await;
    program.stop().await;
    let noon = forty_days_ago(&database).await;
    age(&database, "old", noon).await;
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    // The platform keeps a year: only the tenant's own rule takes it.
    let done = retention::run(&pool, 12 * MONTH).await.expect("done");
    assert_eq!((done.partitions_dropped, done.events_deleted), (0, 1), "{done:?}");
    for table in ["events", "attempts", "event_ids"] {
        let left = database
            .count(&format!("select count(*) from postrider.{table}"))
            .await;
        assert_eq!(left, 1, "{table}");
    }
}

#[tokio::test]
async fn a_partition_with_an_open_transaction_on_it_is_dropped_later_and_no_emit_waits() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let mut producer = database.connect().await;
    for statement in ["begin", "select postrider.emit('acme', 'invoice.paid', '{}')"] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement))
            .execute(&mut producer)
            .await
            .expect(statement);
    }
    // Only now: before it the program's own duty could drop the day unhindered.
    forty_days_ago(&database).await;
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    // The program's own duty may be at it: then ours does nothing, and is asked again.
    let run = tokio::spawn({
        let pool = pool.clone();
        async move {
            until("the producer is in the way", || async {
                retention::run(&pool, MONTH).await.err()
            })
            .await
        }
    });
    for _ in 0..5 {
        let (status, _) = api
            .emit("acme", json!({ "type": "invoice.paid", "data": {} }))
            .await;
        assert_eq!(status, StatusCode::ACCEPTED);
    }
    run.await.expect("no panic");
    receiver.wait_for(5).await;
    sqlx::raw_sql("commit")
        .execute(&mut producer)
        .await
        .expect("committed");
    until("it is dropped", || async {
        let _ = retention::run(&pool, MONTH).await;
        let name = (Utc::now() - TimeDelta::days(40)).format("%Y%m%d");
        let left =
            format!("select count(*) from pg_class where relname in ('events_{name}', 'attempts_{name}')");
        (database.count(&left).await == 0).then_some(())
    })
    .await;
    receiver.wait_for(6).await;
}

/// From now until the first instant that no partition is for, in hours.
const HORIZON_HOURS: &str = "with recursive bound as (
        select substring(pg_get_expr(c.relpartbound, c.oid) from $$FROM \\('([0-9a-f-]+)'\\)$$)::uuid as low,
               substring(pg_get_expr(c.relpartbound, c.oid) from $$TO \\('([0-9a-f-]+)'\\)$$)::uuid as high
        from pg_inherits i join pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'postrider.{table}'::regclass and not i.inhdetachpending
     ), reached as (
        select b.high from bound b
        where b.low <= postrider.uuid_floor(clock_timestamp()) and b.high > postrider.uuid_floor(clock_timestamp())
        union select b.high from reached r join bound b on b.low = r.high
     )
     select coalesce(extract(epoch from postrider.uuid_time(max(high::text)::uuid) - clock_timestamp()) / 3600, 0)::bigint
     from reached";

#[tokio::test]
async fn producers_can_do_without_us_for_weeks_however_little_is_kept() {
    for kept in ["10s", "20m", "2h", "24h", "30d"] {
        let database = Database::empty().await;
        for _ in 0..2 {
            let output = Postrider::on_database("migrate", &database)
                .set("POSTRIDER_RETENTION", kept)
                .output();
            let told = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{told}");
        }
        for table in ["events", "attempts"] {
            let hours = database.count(&HORIZON_HOURS.replace("{table}", table)).await;
            assert!(hours >= 14 * 24 - 1, "{kept}: {table} for {hours} h");
        }
    }
}

/// As after weeks without a dispatcher: time has come to the wide partition.
#[tokio::test]
async fn what_is_emitted_beyond_the_horizon_is_kept_delivered_and_forgotten_in_time() {
    let database = Database::empty().await;
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    schema::migrate(&pool).await.expect("migrated");
    let kept = Duration::from_secs(10);
    let past = Utc::now() - TimeDelta::minutes(30);
    partitions::make_ahead_at(&pool, kept, past).await.expect("made");
    let horizon = HORIZON_HOURS.replace("{table}", "events");
    assert!(
        database.count(&horizon).await >= 13 * 24,
        "the wide one is in use"
    );
    let program = Postrider::start_with(&database, &[("POSTRIDER_RETENTION", "10s")]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    for n in 0..5 {
        let event = json!({ "id": format!("e{n}"), "type": "invoice.paid", "data": {} });
        assert_eq!(api.emit("acme", event).await.0, StatusCode::ACCEPTED);
    }
    receiver.wait_for(5).await;
    for table in ["events", "attempts", "event_ids"] {
        let left = format!("select count(*) from postrider.{table}");
        until("what is old goes", || async {
            (database.count(&left).await == 0).then_some(())
        })
        .await;
    }
    assert_eq!(
        api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
            .await
            .0,
        StatusCode::ACCEPTED
    );
}

#[tokio::test]
async fn partitions_are_made_ahead_while_a_producer_is_open_and_no_emit_waits_long() {
    let database = Database::empty().await;
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    schema::migrate(&pool).await.expect("migrated");
    let begin = Utc::now();
    partitions::make_ahead_at(&pool, MONTH, begin)
        .await
        .expect("made");
    database
        .execute(
            "insert into postrider.tenants (slug) values ('acme');
             with made as (insert into postrider.event_types (name, matches) values ('a.b', '{*}') returning id)
             insert into postrider.schemas (type_id, version, schema) select id, '1', '{}' from made",
        )
        .await;
    let horizon = HORIZON_HOURS.replace("{table}", "events");
    let before = database.count(&horizon).await;
    let mut producer = database.connect().await;
    sqlx::raw_sql("begin; select postrider.emit('acme', 'a.b', '{}')")
        .execute(&mut producer)
        .await
        .expect("emitted");
    let slowest = tokio::spawn({
        let mut others = database.connect().await;
        async move {
            let (mut slowest, began) = (Duration::ZERO, std::time::Instant::now());
            while began.elapsed() < Duration::from_secs(3) {
                let one = std::time::Instant::now();
                sqlx::query("select postrider.emit('acme', 'a.b', '{}')")
                    .execute(&mut others)
                    .await
                    .expect("emitted");
                slowest = slowest.max(one.elapsed());
            }
            slowest
        }
    });
    // The producer is in the way: nothing is lost by it.
    partitions::make_ahead_at(&pool, MONTH, begin + TimeDelta::days(1))
        .await
        .expect("it is tried again later");
    assert!(
        database.count(&horizon).await >= before,
        "the horizon does not shrink"
    );
    sqlx::raw_sql("commit")
        .execute(&mut producer)
        .await
        .expect("committed");
    for day in 1..4 {
        partitions::make_ahead_at(&pool, MONTH, begin + TimeDelta::days(day))
            .await
            .expect("made");
    }
    let slowest = slowest.await.expect("no panic");
    println!("the slowest emit beside it took {slowest:?}");
    assert!(slowest < Duration::from_millis(700), "{slowest:?}");
    let days = database
        .count("select count(*) from pg_class where relname ~ '^events_[0-9]{8}$' and relkind = 'r'")
        .await;
    assert!(days >= 18, "days are made, {days} of them");
    assert!(database.count(&horizon).await >= before + 3 * 24 - 1);
}

#[tokio::test]
async fn jobs_go_a_week_after_their_end_whichever_end_it_was() {
    let database = Database::fresh().await;
    let job = |status: &str, attempts: i32, days: i32| {
        format!(
            "insert into apalis.jobs (id, job_type, job, status, attempts, max_attempts, run_at)
             values (apalis.generate_ulid(), 'a test''s', '', '{status}', {attempts}, 3, now() - interval '{days} days');"
        )
    };
    for (status, attempts, days) in [
        ("Done", 1, 8),
        ("Killed", 1, 8),
        ("Failed", 3, 8),
        // These may still be wanted.
        ("Failed", 2, 8),
        ("Pending", 0, 8),
        ("Killed", 1, 6),
    ] {
        database.execute(&job(status, attempts, days)).await;
    }
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    retention::run(&pool, MONTH).await.expect("done");
    assert_eq!(database.count("select count(*) from apalis.jobs").await, 3);
}
