//! What an answer does to the deliveries that wait: `Retry-After`, 410, days of failure, the breaker; and what people do:
//! pause, delete, enable again.

use std::time::{Duration, Instant, SystemTime};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, Database, Endpoint, Fleet, Postrider, Receiver, repeated, until};

/// What a busy machine may add to a wait.
const SLACK: Duration = Duration::from_millis(1_500);

async fn patch(fleet: &Fleet, endpoint: &Endpoint, body: Value) {
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let (status, answer) = fleet.api().call(Method::PATCH, &path, Some(body)).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
}

async fn shown(fleet: &Fleet, endpoint: &Endpoint) -> Value {
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    fleet.api().get(&path).await
}

async fn disabled(fleet: &Fleet, endpoint: &Endpoint) -> Value {
    until("the endpoint is disabled", || async {
        let shown = shown(fleet, endpoint).await;
        (shown["state"] == "disabled").then_some(shown)
    })
    .await
}

#[tokio::test]
async fn retry_after_postpones_on_429_and_503_and_never_hastens() {
    let fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    let second = Duration::from_secs(1);
    let cases: [(&str, u16, String, Duration, Duration); 6] = [
        ("/seconds-429", 429, "2".to_owned(), 2 * second, 2 * second),
        ("/seconds-503", 503, "2".to_owned(), 2 * second, 2 * second),
        ("/date-503", 503, String::new(), 2 * second, 3 * second),
        ("/sooner-429", 429, "0".to_owned(), second, second),
        (
            "/past-429",
            429,
            "Fri, 31 Dec 1999 23:59:59 GMT".to_owned(),
            second,
            second,
        ),
        ("/not-on-500", 500, "2".to_owned(), second, second),
    ];
    let answers = cases.clone();
    let seen = std::sync::Mutex::new(std::collections::HashSet::new());
    receiver.decide(move |request| {
        let first = seen.lock().expect("not poisoned").insert(request.path.clone());
        let case = answers
            .iter()
            .find(|case| case.0 == request.path)
            .expect("a case");
        // A date has whole seconds: three from now are more than two.
        let date = || httpdate::fmt_http_date(SystemTime::now() + 3 * second);
        let value = if case.2.is_empty() { date() } else { case.2.clone() };
        if first {
            Answer::StatusAnd(case.1, "retry-after", value)
        } else {
            Answer::Status(204)
        }
    });
    for (path, ..) in &cases {
        let settings = json!({ "retry_schedule": ["0s", "1s"] });
        fleet.endpoint(&receiver.url(path), settings).await;
    }
    fleet.emit("invoice.paid", "e", 1).await;
    let came = receiver.wait_for(cases.len() * 2).await;
    fleet.database().drained().await;
    assert_eq!(receiver.count(), cases.len() * 2);
    for (path, _, _, least, most) in cases {
        let attempts: Vec<_> = came.iter().filter(|request| request.path == path).collect();
        let gap = attempts[1].at - attempts[0].at;
        assert!(gap >= least && gap < most + SLACK, "{path}: {gap:?}");
    }
}

#[tokio::test]
async fn an_endpoint_that_is_gone_is_disabled_and_what_waits_for_it_is_dead() {
    let fleet = Fleet::start(1).await;
    let (gone, told, everything) = (
        Receiver::start().await,
        Receiver::start().await,
        Receiver::start().await,
    );
    // Two wait to be tried again, two are on the wire, the rest waits for its first attempt. Those that follow before the
    // endpoint is disabled take so long that there are just as many as its bulkhead has places.
    gone.script([500, 500].map(Answer::Status));
    gone.script([410, 410].map(Answer::HoldThen));
    gone.answer(Answer::After(Duration::from_secs(3), 410));
    let endpoint = fleet
        .endpoint_for("order.made", &gone.url("/hook"), json!({ "concurrency": 2 }))
        .await;
    let by_name = json!({ "types": ["postrider.endpoint.disabled"] });
    fleet.endpoint(&told.url("/hook"), by_name).await;
    fleet.endpoint(&everything.url("/hook"), json!({})).await;
    fleet.emit("order.made", "e", 500).await;
    gone.wait_for(4).await;
    gone.release();
    let shown = disabled(&fleet, &endpoint).await;
    assert_eq!(shown["state_reason"], "gone", "{shown}");
    fleet.database().drained().await;
    let dead = "select count(*) from postrider.dead_letters where reason = 'gone'";
    assert_eq!(fleet.database().count(dead).await, 500);
    let counted = "select count::bigint from postrider.dead_letter_counts where reason = 'gone'";
    assert_eq!(fleet.database().count(counted).await, 500);
    let asked = gone.count();
    assert!(asked <= 6, "{asked} requests to an endpoint that is gone");

    let event = told.wait_for(1).await.remove(0);
    assert_eq!(event.field("type"), "postrider.endpoint.disabled");
    assert_eq!(event.field("data")["endpoint"], endpoint.id);
    assert_eq!(event.field("data")["reason"], "gone");
    let audited = format!(
        "select count(*) from postrider.audit where action = 'endpoint.disabled' and subject = '{}'",
        endpoint.id
    );
    assert_eq!(fleet.database().count(&audited).await, 1);
    // What is emitted now does not go to it. It has passed all the others by when it has come to one of them.
    fleet.emit("order.made", "later", 1).await;
    everything.wait_for(501).await;
    fleet.database().drained().await;
    let types: Vec<Value> = everything.received().iter().map(|r| r.field("type")).collect();
    assert!(
        types.iter().all(|name| name == "order.made"),
        "`*` is not for events of the platform"
    );
    assert_eq!((told.count(), everything.count()), (1, 501));
    assert_eq!(gone.count(), asked, "it is left alone");
}

#[tokio::test]
async fn what_comes_to_a_paused_endpoint_waits_until_it_is_resumed() {
    let fleet = Fleet::start(1).await;
    let (paused, beside) = (Receiver::start().await, Receiver::start().await);
    let endpoint = fleet.endpoint(&paused.url("/hook"), json!({})).await;
    fleet.endpoint(&beside.url("/hook"), json!({})).await;
    fleet.emit("invoice.paid", "before", 10).await;
    paused.wait_for(10).await;
    patch(&fleet, &endpoint, json!({ "enabled": false })).await;
    let at_pause = paused.count();
    fleet.emit("invoice.paid", "meanwhile", 300).await;
    beside.wait_for(310).await;
    assert_eq!(
        (at_pause, paused.count()),
        (10, 10),
        "nothing is sent while it is paused"
    );
    patch(&fleet, &endpoint, json!({ "enabled": true })).await;
    let came = paused.wait_for(310).await;
    fleet.database().drained().await;
    assert_eq!(repeated(&came), []);
    assert_eq!(paused.count(), 310);
}

#[tokio::test]
async fn nothing_is_sent_to_a_deleted_endpoint_once_the_delete_is_answered_and_its_rows_go_away() {
    const WAITING: usize = 3_000;
    let fleet = Fleet::start(2).await;
    fleet.balanced().await;
    let receiver = Receiver::start().await;
    let mut endpoints = Vec::new();
    for number in 0..6 {
        let url = receiver.url(&format!("/{number}"));
        endpoints.push(fleet.endpoint(&url, json!({ "concurrency": 8 })).await);
    }
    fleet.emit("invoice.paid", "e", WAITING).await;
    // A producer that was in the middle of it and commits when the endpoint is gone.
    let mut late = fleet.database().connect().await;
    sqlx::raw_sql("begin; select postrider.emit('acme', 'invoice.paid', '{}') from generate_series(1, 100)")
        .execute(&mut late)
        .await
        .expect("emitted");
    receiver.wait_for(100).await;
    let mut answered = Vec::new();
    for (number, endpoint) in endpoints.iter().enumerate() {
        let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
        let (status, _) = fleet.api().call(Method::DELETE, &path, None).await;
        answered.push((format!("/{number}"), Instant::now()));
        assert_eq!(status, StatusCode::NO_CONTENT);
    }
    sqlx::raw_sql("commit")
        .execute(&mut late)
        .await
        .expect("committed");
    fleet.database().drained().await;
    let came = receiver.received();
    assert!(came.len() < endpoints.len() * WAITING, "thousands were waiting");
    for (path, at) in answered {
        let after: Vec<Duration> = came
            .iter()
            .filter(|request| request.path == path && request.at > at)
            .map(|request| request.at - at)
            .collect();
        assert!(after.is_empty(), "{path}: sent after the answer: {after:?}");
    }
}

#[tokio::test]
async fn an_endpoint_that_failed_for_five_days_is_disabled_and_one_failure_after_it_is_enabled_is_not_enough()
{
    let fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let settings = json!({ "retry_schedule": ["0s", "1d"] });
    let endpoint = fleet.endpoint(&receiver.url("/hook"), settings).await;
    fleet.emit("invoice.paid", "first", 1).await;
    let failing = "select count(*) from postrider.endpoint_health";
    until("its failure is noted", || async {
        (fleet.database().count(failing).await == 1).then_some(())
    })
    .await;
    assert_eq!(shown(&fleet, &endpoint).await["state"], "active");
    let long_ago = "update postrider.endpoint_health
        set failing_since = now() - interval '5 days 1 minute', failed_days = 4, last_failed_on = last_failed_on - 1";
    fleet.database().execute(long_ago).await;
    fleet.emit("invoice.paid", "second", 1).await;
    let shown_then = disabled(&fleet, &endpoint).await;
    assert_eq!(shown_then["state_reason"], "failing", "{shown_then}");
    fleet.database().drained().await;
    let dead = "select count(*) from postrider.dead_letters where reason = 'endpoint_disabled'";
    assert_eq!(fleet.database().count(dead).await, 2);
    assert_eq!(
        receiver.count(),
        2,
        "what waited for a day died without an attempt"
    );

    patch(&fleet, &endpoint, json!({ "enabled": true })).await;
    let long =
        "select count(*) from postrider.endpoint_health where failing_since < now() - interval '1 minute'";
    assert_eq!(fleet.database().count(long).await, 0, "it starts anew");
    fleet.emit("invoice.paid", "third", 1).await;
    receiver.wait_for(3).await;
    until("the third failure is recorded", || async {
        (fleet
            .database()
            .count("select count(*) from postrider.retries")
            .await
            == 1)
            .then_some(())
    })
    .await;
    assert_eq!(shown(&fleet, &endpoint).await["state"], "active");
    receiver.answer(Answer::Status(204));
    fleet.emit("invoice.paid", "fourth", 1).await;
    receiver.wait_for(4).await;
    until("it is well again", || async {
        (fleet.database().count(failing).await == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn after_ten_failures_in_a_row_one_attempt_at_a_time_probes_until_one_succeeds() {
    const CONCURRENCY: usize = 8;
    let fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::After(Duration::from_millis(30), 500));
    let settings = json!({ "concurrency": CONCURRENCY, "retry_schedule": ["0s", "1d"] });
    fleet.endpoint(&receiver.url("/hook"), settings).await;
    fleet.emit("invoice.paid", "e", 200).await;
    // Ten have failed, and what was on the wire with the tenth is over.
    receiver.wait_for(10 + CONCURRENCY).await;
    receiver
        .wait_until("one is left", |receiver| receiver.in_flight() <= 1)
        .await;
    receiver.forget_in_flight_max();
    let probed = receiver.count();
    receiver.wait_for(probed + 20).await;
    assert_eq!(receiver.in_flight_max(), 1, "only probes");

    receiver.answer(Answer::After(Duration::from_millis(30), 204));
    receiver
        .wait_until("the full load again", |receiver| {
            receiver.in_flight() == CONCURRENCY
        })
        .await;
    receiver.wait_for(200).await;
    assert!(receiver.in_flight_max() <= CONCURRENCY);
    until("all is recorded", || async {
        (fleet
            .database()
            .count("select count(*) from postrider.queue")
            .await
            == 0)
            .then_some(())
    })
    .await;
    assert_eq!(
        receiver.count(),
        200,
        "what failed waits a day, as its schedule says"
    );
}

#[tokio::test]
async fn failures_on_one_day_or_after_a_long_pause_do_not_disable_an_endpoint() {
    let fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(502));
    let settings = json!({ "retry_schedule": ["0s", "1d"] });
    let endpoint = fleet.endpoint(&receiver.url("/hook"), settings).await;
    let fail = async |number: i64| {
        fleet.emit("invoice.paid", &format!("e{number}"), 1).await;
        until("the failure is recorded", || async {
            let recorded = "select count(*) from postrider.attempts";
            (fleet.database().count(recorded).await == number).then_some(())
        })
        .await;
        // Disabling it would follow at once.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(
            shown(&fleet, &endpoint).await["state"],
            "active",
            "failure {number}"
        );
    };
    fail(1).await;
    let old = "update postrider.endpoint_health set failing_since = now() - interval '6 days'";
    fleet.database().execute(old).await;
    fail(2).await;

    // A delivery that failed on three days and died; nothing was sent for four days since.
    let pause = "update postrider.endpoint_health
        set failing_since = now() - interval '6 days', failed_days = 3, last_failed_on = last_failed_on - 4";
    fleet.database().execute(pause).await;
    fail(3).await;
    let began = "select count(*) from postrider.endpoint_health
        where failing_since > now() - interval '1 minute' and failed_days = 1";
    assert_eq!(
        fleet.database().count(began).await,
        1,
        "counted from this failure"
    );
}

#[tokio::test]
async fn an_endpoint_that_cannot_be_disabled_yet_holds_up_no_results_and_is_disabled_later() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let (gone, healthy) = (Receiver::start().await, Receiver::start().await);
    gone.answer(Answer::Status(410));
    let api = program.api();
    api.tenant("acme").await;
    api.tenant("other").await;
    api.event_type("invoice.paid").await;
    let endpoint = api.endpoint("acme", &gone.url("/gone"), json!({})).await;
    api.endpoint("other", &healthy.url("/hook"), json!({})).await;
    let mut holder = database.connect().await;
    sqlx::raw_sql("begin; select from postrider.endpoints where url like '%/gone' for update")
        .execute(&mut holder)
        .await
        .expect("locked");
    let event = json!({ "type": "invoice.paid", "data": {} });
    api.emit("acme", event.clone()).await;
    api.wait_for_state("acme", "dead", 1).await;
    let began = Instant::now();
    for _ in 0..20 {
        api.emit("other", event.clone()).await;
    }
    api.wait_for_state("other", "delivered", 20).await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "the results waited {took:?}");

    // That it is to be disabled outlives the process, and needs no other answer of the endpoint.
    program.kill();
    sqlx::raw_sql("rollback")
        .execute(&mut holder)
        .await
        .expect("unlocked");
    program.restart().await;
    let api = program.api();
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let shown = until("the endpoint is disabled", || async {
        let shown = api.get(&path).await;
        (shown["state"] == "disabled").then_some(shown)
    })
    .await;
    assert_eq!(shown["state_reason"], "gone", "{shown}");
    assert_eq!(gone.count(), 1);
}

#[tokio::test]
async fn the_rows_of_a_deleted_endpoint_are_removed_in_batches() {
    const ROWS: i64 = 30_000;
    let fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    let endpoint = fleet.endpoint(&receiver.url("/hook"), json!({})).await;
    patch(&fleet, &endpoint, json!({ "enabled": false })).await;
    let database = fleet.database();
    database
        .execute(&format!(
            "insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
             select e.id, gen_random_uuid(), e.shard, e.tenant_id, 1 from postrider.endpoints e, generate_series(1, {ROWS});
             create function refuse_many() returns trigger language plpgsql as $$
             begin
                 if (select count(*) from gone) > 5000 then raise exception 'too many rows in one statement'; end if;
                 return null;
             end $$;
             create trigger refuse_many after delete on postrider.queue referencing old table as gone
                 for each statement execute function refuse_many()"
        ))
        .await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let (status, _) = fleet.api().call(Method::DELETE, &path, None).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    database.drained().await;
}

/// What a replay does, or its cancellation, in a transaction of its own: a statement that waits for it looks for the row in
/// both tables as they were before.
#[tokio::test]
async fn a_result_is_recorded_although_its_delivery_is_moved_to_another_table_meanwhile() {
    let fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    receiver.script([Answer::Status(500), Answer::HoldThen(500)]);
    let schedule = json!({ "retry_schedule": ["0s", "500ms", "1h"] });
    fleet.endpoint(&receiver.url("/"), schedule).await;
    fleet.emit("invoice.paid", "moved", 1).await;
    receiver.wait_for(2).await;
    let mut connection = fleet.database().connect().await;
    let mut moving = sqlx::Connection::begin(&mut connection)
        .await
        .expect("a transaction");
    let moved = sqlx::query(
        "with waiting as (delete from postrider.retries returning *)
         insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, attempt)
         select w.endpoint_id, w.event_id, e.shard, w.tenant_id, w.type_id, w.attempt
         from waiting w join postrider.endpoints e on e.id = w.endpoint_id",
    )
    .execute(&mut *moving)
    .await
    .expect("moved");
    assert_eq!(moved.rows_affected(), 1, "the delivery is between two attempts");
    receiver.release();
    until("the recorder waits for the transaction", || async {
        let waiting = "select count(*) from pg_stat_activity
                       where wait_event_type = 'Lock' and datname = current_database()";
        (fleet.database().count(waiting).await > 0).then_some(())
    })
    .await;
    moving.commit().await.expect("committed");
    until("the second attempt is recorded", || async {
        let recorded = "select count(*) from postrider.attempts";
        (fleet.database().count(recorded).await == 2).then_some(())
    })
    .await;
    assert_eq!(
        fleet
            .database()
            .count("select count(*) from postrider.retries where attempt = 2")
            .await,
        1
    );
    assert_eq!(receiver.count(), 2, "nothing is sent again");
}
