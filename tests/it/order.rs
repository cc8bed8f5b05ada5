//! Order where it is asked for: the events of one key one at a time, in sequence, and nobody else held up by it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Mutex,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::support::{Answer, Database, Fleet, Received, Receiver, most_at_once};

const KEYS: usize = 5;

/// Emits to the keys in turn, a transaction each, some of them rolled back.
async fn produce(database: &Database, producer: usize, count: usize) {
    let mut connection = database.connect().await;
    for number in 0..count {
        let key = (producer + number) % KEYS;
        for end in ["rollback", "commit"] {
            if end == "rollback" && number % 5 != 0 {
                continue;
            }
            let data = json!({ "key": key }).to_string();
            sqlx::raw_sql("begin")
                .execute(&mut connection)
                .await
                .expect("begun");
            sqlx::query("select postrider.emit('acme', 'invoice.paid', $1, ordering_key => $2)")
                .bind(data)
                .bind(format!("key-{key}"))
                .execute(&mut connection)
                .await
                .expect("emitted");
            sqlx::raw_sql(end).execute(&mut connection).await.expect("ended");
        }
    }
}

fn by_key(requests: &[Received], path: &str) -> BTreeMap<i64, Vec<Received>> {
    let mut keys: BTreeMap<i64, Vec<Received>> = BTreeMap::new();
    for request in requests.iter().filter(|request| request.path == path) {
        let key = request.field("data")["key"].as_i64().expect("a key");
        keys.entry(key).or_default().push(request.clone());
    }
    keys
}

fn sequence(request: &Received) -> i64 {
    request.field("sequence").as_i64().expect("a sequence")
}

#[tokio::test]
async fn each_key_arrives_in_sequence_one_at_a_time_also_when_attempts_fail() {
    const PRODUCERS: usize = 4;
    const EACH: usize = 50;
    const ALL: usize = PRODUCERS * EACH;
    let mut fleet = Fleet::start(2).await;
    let receiver = Receiver::start().await;
    // One in seven fails at its first attempt.
    let failed: Mutex<HashMap<String, ()>> = Mutex::default();
    receiver.decide(move |request| {
        let first = || {
            let mut failed = failed.lock().expect("not poisoned");
            failed.insert(request.event_id().to_owned(), ()).is_none()
        };
        let status = if request.path == "/ordered" && sequence(request) % 7 == 3 && first() {
            500
        } else {
            204
        };
        Answer::After(Duration::from_millis(2), status)
    });
    let settings = json!({ "ordered": true, "retry_schedule": ["0s", "100ms", "100ms"] });
    fleet.endpoint(&receiver.url("/ordered"), settings).await;
    fleet.endpoint(&receiver.url("/any"), json!({})).await;
    let database = fleet.database();
    tokio::join!(
        produce(database, 0, EACH),
        produce(database, 1, EACH),
        produce(database, 2, EACH),
        produce(database, 3, EACH)
    );
    // A shard that moves in the middle takes the order with it.
    fleet.add().await;
    fleet.database().drained().await;
    let came = receiver.received();
    assert_eq!(came.iter().filter(|request| request.path == "/any").count(), ALL);
    let keys = by_key(&came, "/ordered");
    assert_eq!(keys.len(), KEYS);
    for (key, requests) in &keys {
        let expected: Vec<i64> = (1..=(ALL / KEYS) as i64)
            .flat_map(|n| std::iter::repeat_n(n, if n % 7 == 3 { 2 } else { 1 }))
            .collect();
        let sequences: Vec<i64> = requests.iter().map(sequence).collect();
        assert_eq!(sequences, expected, "key {key}");
        assert_eq!(most_at_once(requests), 1, "key {key}");
    }
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn a_key_that_fails_holds_up_neither_other_keys_nor_other_endpoints() {
    const EACH: usize = 20;
    let fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    // Key 0 fails; the next of its line may come only when the first is dead.
    receiver.decide(|request| {
        let fails = request.path == "/ordered" && request.field("data")["key"] == 0 && sequence(request) == 1;
        Answer::Status(if fails { 500 } else { 204 })
    });
    let settings = json!({ "ordered": true, "retry_schedule": ["0s", "3s", "4s"] });
    fleet.endpoint(&receiver.url("/ordered"), settings).await;
    fleet.endpoint(&receiver.url("/any"), json!({})).await;
    let emitted = Instant::now();
    produce(fleet.database(), 0, EACH * KEYS).await;
    receiver
        .wait_until("all but the key that fails", |receiver| {
            receiver.count() >= EACH * KEYS + EACH * (KEYS - 1)
        })
        .await;
    fleet.database().drained().await;
    let came = receiver.received();
    let keys = by_key(&came, "/ordered");
    let first = &keys[&0];
    let sequences: Vec<i64> = first.iter().map(sequence).collect();
    let expected: Vec<i64> = [1, 1].into_iter().chain(1..=EACH as i64).collect();
    assert_eq!(sequences, expected, "three attempts, then the others");
    let died = first[2].at;
    assert!(died - emitted >= Duration::from_secs(7));
    for (key, requests) in keys.iter().filter(|(key, _)| **key != 0) {
        let sequences: Vec<i64> = requests.iter().map(sequence).collect();
        assert_eq!(sequences, (1..=EACH as i64).collect::<Vec<_>>(), "key {key}");
        assert!(
            requests.iter().all(|request| request.at < died),
            "key {key} was held up"
        );
    }
    let any: Vec<&Received> = came.iter().filter(|request| request.path == "/any").collect();
    assert_eq!(any.len(), EACH * KEYS);
    assert!(
        any.iter().all(|request| request.at < died),
        "the other endpoint was held up"
    );
}
