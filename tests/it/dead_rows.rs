//! Rows that have come and gone while an old snapshot is open, as a backup holds one, can't be cleaned up, and deleted endpoints
//! stay for good. Neither holds up what is sent.

use std::time::{Duration, Instant};

use serde_json::json;
use sqlx::Executor;

use crate::support::{Database, Fleet, Receiver, until};

/// Rows of the queue for one endpoint.
const COME: &str = "insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
     select e.id, gen_random_uuid(), e.shard, e.tenant_id, 1
     from postrider.endpoints e, generate_series(1, 1200000) where e.url like '%/busy'";
const GONE: &str = "delete from postrider.queue q using postrider.endpoints e
     where e.id = q.endpoint_id and e.url like '%/busy'";
const DELETED: &str = "insert into postrider.endpoints (public_id, tenant_id, shard, url, state, updated_at)
     select 'ep_gone' || n, e.tenant_id, n % 64, e.url, 'deleted', now() - n * interval '1 second'
     from postrider.endpoints e, generate_series(1, 1000000) n where e.url like '%/busy'";

#[tokio::test]
async fn a_dispatcher_that_starts_beside_a_long_backup_delivers_at_once() {
    let database = Database::on_private_server().await;
    let mut fleet = Fleet::start_on(database, 1, &[]).await;
    let receiver = Receiver::start().await;
    fleet
        .endpoint_for("busy.happened", &receiver.url("/busy"), json!({}))
        .await;
    fleet.endpoint(&receiver.url("/other"), json!({})).await;
    fleet.emit("invoice.paid", "warm", 1).await;
    receiver.wait_for(1).await;
    let first = fleet.ids()[0];
    fleet.stop(first).await;

    let mut backup = fleet.database().connect().await;
    backup
        .execute("begin isolation level repeatable read; select count(*) from postrider.tenants")
        .await
        .expect("a snapshot");
    for statement in [COME, GONE, DELETED] {
        fleet.database().execute(statement).await;
    }
    fleet.add().await;
    fleet.balanced().await;
    for number in 0..5 {
        let emitted = Instant::now();
        fleet.emit("invoice.paid", &format!("other-{number}"), 1).await;
        receiver.wait_for(2 + number).await;
        let took = emitted.elapsed();
        assert!(took < Duration::from_millis(800), "event {number} took {took:?}");
    }
    fleet.emit("busy.happened", "busy", 1).await;
    receiver.wait_for(7).await;
    backup.execute("rollback").await.expect("ended");
}

/// Autovacuum is off for the queue: what becomes of its dead rows is the dispatcher's own work.
#[tokio::test]
async fn a_dispatcher_under_load_vacuums_the_queue_itself() {
    let database = Database::on_private_server().await;
    let fleet = Fleet::start_on(database, 1, &[]).await;
    fleet
        .database()
        .execute("alter table postrider.queue set (autovacuum_enabled = off)")
        .await;
    let receiver = Receiver::start().await;
    fleet.endpoint(&receiver.url("/"), json!({})).await;
    fleet.emit("invoice.paid", "event", 2_000).await;
    receiver.wait_for(2_000).await;
    until("the queue is vacuumed", || async {
        let count = "select vacuum_count from pg_stat_user_tables where relid = 'postrider.queue'::regclass";
        (fleet.database().count(count).await > 0).then_some(())
    })
    .await;
}
