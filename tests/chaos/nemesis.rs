//! Does what the plan says, and writes down from when to when it was done.

use std::{sync::Arc, time::Duration};

use rustix::process::Signal;
use serde_json::json;
use sqlx::{Connection, PgConnection, Row};
use tokio::{task::JoinSet, time::sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    bad_tenants::{Bad, BadTenant},
    history::{Harm, SecretLife},
    installation::{Installation, PATIENT, new_secret},
    plan::{Again, Ending, Fault, Made, Plan, Target, VISITED},
    producers::VISITORS,
    proxy::Mode,
    receivers::Mood,
    runs,
};

/// Until a dispatcher has given up every connection that fell silent.
const SILENCE_LASTS: Duration = Duration::from_secs(12);
/// Overlap of a rotation: the old secret signs for this long.
const OVERLAP_SECONDS: i64 = 2;
/// By then every fault that keeps a caller from an answer is over.
const KNOWN_BY: Duration = Duration::from_secs(120);

/// Returns when every fault has come to its end.
pub(crate) async fn afflict(installation: &Arc<Installation>, plan: &Plan) {
    let began = installation.time.now();
    let mut running = JoinSet::new();
    for (at, fault) in plan.faults.clone() {
        let wait = (began + at).saturating_sub(installation.time.now());
        sleep(wait).await;
        let installation = installation.clone();
        running.spawn(async move { inflict(&installation, fault).await });
    }
    running.join_all().await;
}

fn of_dispatcher(target: Target, harm: Harm) -> Harm {
    match target {
        Target::Dispatcher(_) => harm,
        Target::Api(_) | Target::Producers => Harm::None,
    }
}

async fn inflict(it: &Installation, fault: Fault) {
    let from = it.time.now();
    let harm = match fault.clone() {
        Fault::Kill(target, down) => {
            kill(it, target, down).await;
            of_dispatcher(target, Harm::Death)
        }
        Fault::Sleep(target, length) => {
            doze(it, target, length).await;
            of_dispatcher(target, Harm::Sleep)
        }
        Fault::Restart(target) => {
            restart(it, target).await;
            Harm::None
        }
        Fault::CrashDatabase => {
            let _one = it.server.lock().await;
            it.database.crash_server().await;
            Harm::Outage
        }
        Fault::Sever(target) => {
            it.proxy(target).cut();
            of_dispatcher(target, Harm::Outage)
        }
        Fault::Silence(target) => {
            it.proxy(target).silence();
            // Found out by waiting in vain.
            sleep(SILENCE_LASTS).await;
            of_dispatcher(target, Harm::Outage)
        }
        Fault::Freeze(target, length) => {
            through_proxy(it, target, Mode::Frozen, length).await;
            of_dispatcher(target, Harm::Outage)
        }
        Fault::LoseReplies(target, length) => {
            through_proxy(it, target, Mode::Deaf, length).await;
            // What was asked meanwhile is never answered: only an end of the connection tells.
            it.proxy(target).cut();
            of_dispatcher(target, Harm::Outage)
        }
        Fault::TerminateSessions => {
            terminate(it).await;
            Harm::Outage
        }
        Fault::FillDisk(length) => fill_disk(it, length).await,
        Fault::LongTransaction(length) => {
            hold_transaction(it, length).await;
            Harm::None
        }
        Fault::Hang(place, length) => feel(it, place, Mood::Hangs, length).await,
        Fault::Fail(place, length) => feel(it, place, Mood::Fails, length).await,
        Fault::Reset(place, length) => feel(it, place, Mood::Resets, length).await,
        Fault::ReceiversAway(length) => {
            it.receivers.go_away();
            sleep(length).await;
            it.receivers.come_back().await;
            Harm::None
        }
        Fault::MoveShards => {
            move_shards(it).await;
            Harm::Robbery
        }
        Fault::ExpireLeases => {
            let set_back =
                "update postrider.dispatchers set expires_at = clock_timestamp() - interval '1 minute'";
            execute(it, set_back).await;
            Harm::None
        }
        Fault::RotateSecret(place, _) | Fault::Pause(place, _)
            if !it.changing.lock().expect("not poisoned").insert(place) =>
        {
            return;
        }
        Fault::RotateSecret(place, made) => {
            rotate(it, place, made).await;
            it.changing.lock().expect("not poisoned").remove(&place);
            Harm::None
        }
        Fault::Pause(place, length) => {
            pause(it, place, length).await;
            it.changing.lock().expect("not poisoned").remove(&place);
            Harm::None
        }
        Fault::Replay => {
            replay(it).await;
            Harm::None
        }
        Fault::ReplayMany(place, again, cancelled) => {
            replay_many(it, place, again, cancelled).await;
            Harm::None
        }
        Fault::PassingEndpoint(length) => {
            passing_endpoint(it, length).await;
            Harm::None
        }
        Fault::Visit(number, length) => {
            visit(it, number, length).await;
            Harm::None
        }
        Fault::Guest(number, length, ending) => {
            guest(it, number, length, ending).await;
            match ending {
                Ending::Kill => Harm::Death,
                Ending::Term => Harm::None,
            }
        }
        Fault::Misbehave(bad, length) => {
            misbehave(it, bad, length).await;
            Harm::None
        }
        Fault::Quiet(length) => {
            sleep(length).await;
            return;
        }
    };
    it.note(&fault, harm, from);
}

async fn kill(it: &Installation, target: Target, down: Duration) {
    let Some(slot) = it.slot(target) else { return };
    let mut running = slot.running.lock().await;
    if let Some(mut process) = running.take() {
        if process.is_running() {
            process.kill();
        }
        slot.ended(process);
    }
    sleep(down).await;
    it.start_in(target, slot, &mut running).await;
}

async fn doze(it: &Installation, target: Target, length: Duration) {
    let Some(slot) = it.slot(target) else { return };
    let mut running = slot.running.lock().await;
    if let Some(process) = running.as_mut()
        && process.is_running()
    {
        process.signal(Signal::STOP);
        sleep(length).await;
        process.signal(Signal::CONT);
    }
}

async fn restart(it: &Installation, target: Target) {
    let Some(slot) = it.slot(target) else { return };
    let mut running = slot.running.lock().await;
    if let Some(mut process) = running.take() {
        if process.is_running() {
            // A clean stop may be cut short by other faults; how it ended is not judged here.
            process.stop().await;
        }
        slot.ended(process);
    }
    it.start_in(target, slot, &mut running).await;
}

async fn through_proxy(it: &Installation, target: Target, mode: Mode, length: Duration) {
    it.proxy(target).set(mode);
    sleep(length).await;
    it.proxy(target).set(Mode::Pass);
}

async fn feel(it: &Installation, place: usize, mood: Mood, length: Duration) -> Harm {
    it.receivers.set(place, mood);
    sleep(length).await;
    it.receivers.set(place, Mood::Usual);
    Harm::None
}

/// The server may be away just now: then nothing happens.
async fn execute(it: &Installation, statement: &'static str) {
    let work = async {
        let options = it.database.options();
        let mut connection = PgConnection::connect_with(&options).await?;
        sqlx::raw_sql(statement).execute(&mut connection).await?;
        connection.close().await
    };
    let _ = tokio::time::timeout(Duration::from_secs(5), work).await;
}

async fn terminate(it: &Installation) {
    let all = "select pg_terminate_backend(pid) from pg_stat_activity
               where usename = current_user and datname = current_database() and pid <> pg_backend_pid()";
    execute(it, all).await;
}

async fn move_shards(it: &Installation) {
    let some = "update postrider.shards set owner = null, epoch = epoch + 1
                where shard in (select shard from postrider.shards order by random() limit 16)";
    execute(it, some).await;
}

async fn fill_disk(it: &Installation, length: Duration) -> Harm {
    let Some(disk) = &it.disk else {
        return Harm::None;
    };
    let _one = it.server.lock().await;
    disk.fill();
    sleep(length).await;
    disk.empty();
    // A server that could not write its log has ended: whoever watches over it starts it again.
    while !it.database.start_server().await {
        if accepts_connections(it).await {
            break;
        }
        sleep(Duration::from_millis(200)).await;
    }
    Harm::Outage
}

async fn accepts_connections(it: &Installation) -> bool {
    let connect = PgConnection::connect_with(&it.database.options()).await;
    match connect {
        Ok(connection) => connection.close().await.is_ok(),
        Err(_) => false,
    }
}

async fn hold_transaction(it: &Installation, length: Duration) {
    let options = it.database.options();
    let Ok(mut connection) = PgConnection::connect_with(&options).await else {
        return;
    };
    let begun = sqlx::raw_sql(
        "begin isolation level repeatable read; select pg_current_xact_id(), count(*) from postrider.endpoints",
    )
    .execute(&mut connection)
    .await;
    if begun.is_ok() {
        sleep(length).await;
    }
}

/// The endpoint's tenant and public id; none when it is not known or gone.
fn address(it: &Installation, place: usize) -> Option<(&'static str, String)> {
    let endpoints = it.endpoints.lock().expect("not poisoned");
    let life = endpoints.get(place)?;
    (life.deleted.is_none() && !life.id.is_empty()).then(|| (life.tenant, life.id.clone()))
}

/// Repeated until it is known to be done, as a caller should: until then nobody can say which secrets are in force.
async fn rotate(it: &Installation, place: usize, made: Made) {
    let Some((tenant, id)) = address(it, place) else {
        return;
    };
    let own = match made {
        Made::ByUs => Some(new_secret()),
        Made::ByThem => None,
    };
    let asked = it.time.now();
    let unix = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |now| now.as_secs() as i64)
    };
    let body = json!({ "secret": own, "overlap_seconds": OVERLAP_SECONDS });
    let path = format!("/tenants/{tenant}/endpoints/{id}/secret/rotate");
    let answer = it
        .call_until_known(&path, body, KNOWN_BY)
        .await
        .expect("a rotation that is repeated under its key is answered when the faults are over");
    let given = answer["data"][0]["secret"].as_str().expect("a secret").to_owned();
    assert!(
        own.is_none_or(|own| own == given),
        "the secret that was asked for"
    );
    let mut endpoints = it.endpoints.lock().expect("not poisoned");
    let secrets = &mut endpoints[place].secrets;
    // By now the overlap has begun at the latest.
    let retires = unix() + OVERLAP_SECONDS;
    for older in secrets.iter_mut() {
        older.retires_unix = Some(older.retires_unix.map_or(retires, |at| at.min(retires)));
    }
    secrets.push(SecretLife {
        secret: given,
        asked,
        in_effect: Some(it.time.now()),
        retires_unix: None,
    });
}

async fn pause(it: &Installation, place: usize, length: Duration) {
    let Some((tenant, id)) = address(it, place) else {
        return;
    };
    let path = format!("/tenants/{tenant}/endpoints/{id}");
    let confirmed = it
        .call("PATCH", &path, json!({ "enabled": false }))
        .await
        .map(|_| it.time.now());
    sleep(length).await;
    let asked_on = it.time.now();
    if let Some(confirmed) = confirmed {
        let mut endpoints = it.endpoints.lock().expect("not poisoned");
        endpoints[place].pauses.push((confirmed, asked_on));
    }
    it.resume(place).await;
}

/// Sends some delivery that has ended again.
async fn replay(it: &Installation) {
    let pick = async {
        let mut connection = PgConnection::connect_with(&it.database.options()).await?;
        sqlx::query(
            "select t.slug, a.event_id, a.endpoint_id from postrider.attempts a
             join postrider.tenants t on t.id = a.tenant_id
             where a.final is not null order by random() limit 1",
        )
        .fetch_optional(&mut connection)
        .await
    };
    let Ok(Ok(Some(row))) = tokio::time::timeout(Duration::from_secs(5), pick).await else {
        return;
    };
    let delivery = postrider_proto::DeliveryId {
        event: postrider_proto::EventId(row.get(1)),
        endpoint: postrider_proto::EndpointId(row.get(2)),
    };
    let tenant: &str = row.get(0);
    let path = format!("/tenants/{tenant}/deliveries/{delivery}/replay");
    let _ = it.call("POST", &path, json!({})).await;
}

async fn replay_many(it: &Installation, place: usize, again: Again, cancelled: Option<Duration>) {
    let Some((tenant, id)) = address(it, place) else {
        return;
    };
    let mut ask = json!({ "endpoint": id });
    if let Again::Delivered(span) = again {
        ask["state"] = json!("delivered");
        ask["since"] = json!(chrono::Utc::now() - span);
    }
    let path = format!("/tenants/{tenant}/replays");
    let Some(job) = it.call("POST", &path, ask).await else {
        return;
    };
    if let (Some(after), Some(job)) = (cancelled, job["id"].as_str()) {
        sleep(after).await;
        let _ = it.call("DELETE", &format!("{path}/{job}"), json!({})).await;
    }
}

async fn passing_endpoint(it: &Installation, length: Duration) {
    let (place, _) = it
        .endpoint("beta", "order.*", 3, json!({ "retry_schedule": PATIENT }))
        .await;
    sleep(length).await;
    delete(it, place).await;
}

async fn delete(it: &Installation, place: usize) {
    let Some((tenant, id)) = address(it, place) else {
        return;
    };
    let asked = it.time.now();
    it.endpoints.lock().expect("not poisoned")[place].deleted = Some((asked, None));
    let path = format!("/tenants/{tenant}/endpoints/{id}");
    let obeyed = it.call("DELETE", &path, json!({})).await.is_some();
    let confirmed = obeyed.then(|| it.time.now());
    it.endpoints.lock().expect("not poisoned")[place].deleted = Some((asked, confirmed));
}

/// An endpoint that gets its first event at once, and few later: one for each other visitor of its type.
async fn visit(it: &Installation, number: usize, length: Option<Duration>) {
    let type_name = VISITED[number];
    let (place, made) = it
        .endpoint(VISITORS, type_name, 3, json!({ "retry_schedule": PATIENT }))
        .await;
    if !made {
        return;
    }
    greet(it, number, place).await;
    let Some(length) = length else { return };
    sleep(length).await;
    delete(it, place).await;
}

/// An event of this type.
pub(crate) async fn greet(it: &Installation, number: usize, place: usize) {
    let mark = format!("v{place}-{number}-{}", it.time.now().as_micros());
    let producers = runs::producers(it, Duration::ZERO);
    producers.emit_once(VISITORS, VISITED[number], mark).await;
}

async fn guest(it: &Installation, number: usize, length: Duration, ending: Ending) {
    let slot = &it.guests[number];
    // It is there already.
    let Ok(mut running) = slot.running.try_lock() else {
        return;
    };
    slot.start(&mut running).await;
    sleep(length).await;
    if let Some(mut process) = running.take() {
        if process.is_running() {
            match ending {
                Ending::Kill => process.kill(),
                Ending::Term => drop(process.stop().await),
            }
        }
        slot.ended(process);
    }
}

async fn misbehave(it: &Installation, bad: Bad, length: Duration) {
    let Some(tenant) = BadTenant::prepare(&it.ground(), bad).await else {
        return;
    };
    let stop = CancellationToken::new();
    let _ = tokio::time::timeout(length, tenant.misbehave(&stop)).await;
    let receiver = tenant.behave().await;
    it.reformed.lock().expect("not poisoned").push(receiver);
}

/// The snapshot of a backup that takes as long as the run. A server that crashed gets it again.
pub(crate) async fn hold_snapshot(it: &Installation, stop: CancellationToken) {
    let held = async {
        loop {
            if let Ok(mut connection) = PgConnection::connect_with(&it.database.options()).await {
                let begin = "begin isolation level repeatable read; select 1";
                let mut there = sqlx::raw_sql(begin).execute(&mut connection).await.is_ok();
                while there {
                    sleep(Duration::from_secs(1)).await;
                    there = sqlx::raw_sql("select 1").execute(&mut connection).await.is_ok();
                }
            }
            sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::select! {
        () = held => {}
        () = stop.cancelled() => {}
    }
}
