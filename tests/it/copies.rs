//! A copy of a database never sends before somebody has confirmed it, also where the server hides the identity it is known by. And
//! a right that is missing never stops the original without saying so.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Database, Person, Postrider, Receiver, tool, until};

const HIDE: &str = "revoke execute on function pg_catalog.pg_control_system() from public";
const REVEAL: &str = "grant execute on function pg_catalog.pg_control_system() to public";
const WORDS: &str = "may not execute pg_control_system()";

async fn emit(program: &Postrider, id: &str) {
    let event = json!({ "type": "invoice.paid", "data": {}, "id": id });
    assert_eq!(
        program.api().emit("acme", event).await.0,
        StatusCode::ACCEPTED,
        "{id}"
    );
}

async fn until_logged(program: &Postrider, text: &str) {
    until(&format!("the log says {text}"), || async {
        let lines = program.log_lines();
        lines.iter().any(|line| line.contains(text)).then_some(())
    })
    .await;
}

/// What `postrider doctor` says about sending.
fn diagnosis(database: &Database) -> Value {
    let output = Postrider::on_database("doctor --json", database).output();
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let mut checks = report["checks"].as_array().expect("a list").iter();
    checks
        .find(|check| check["check"] == "work.sending")
        .expect("checked")
        .clone()
}

async fn resume(program: &Postrider, confirm: bool) -> (StatusCode, Value) {
    let body = json!({ "stopped": false, "confirm_restored": confirm });
    program.api().call(Method::PUT, "/sending", Some(body)).await
}

/// Stopped, and every place says why.
async fn assert_says_why(program: &Postrider, database: &Database) {
    let state = program.api().get("/sending").await;
    let flags = ["stopped", "restored", "identity_hidden"].map(|name| state[name] == true);
    assert_eq!(flags, [true; 3], "{state}");
    let (status, problem) = resume(program, false).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    let mut admin = Person::signed_in(program).await;
    let texts = [
        problem["detail"].as_str().expect("text").to_owned(),
        tool(program, &["sending", "status"]).await.out,
        admin.visit("/endpoints").await.1,
        diagnosis(database)["found"].as_str().expect("text").to_owned(),
    ];
    for text in texts {
        assert!(text.contains(WORDS), "{text}");
    }
    let (_, page) = admin.visit("/system").await;
    assert!(
        page.contains("may not execute <code>pg_control_system()</code>"),
        "{page}"
    );
    let advice = diagnosis(database)["advice"].as_str().expect("text").to_owned();
    assert!(
        advice.contains("grant execute on function pg_catalog.pg_control_system() to"),
        "{advice}"
    );
}

#[tokio::test]
async fn a_right_that_is_revoked_stops_sending_in_words_and_granting_it_is_enough() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    emit(&program, "one").await;
    receiver.wait_for(1).await;
    assert_eq!(diagnosis(&database)["verdict"], "ok");

    database.execute_here_as_superuser(HIDE).await;
    until_logged(&program, "sending is stopped").await;
    emit(&program, "two").await;
    assert_says_why(&program, &database).await;
    assert!(program.stop().await.success());
    program.restart().await;
    until_logged(&program, WORDS).await;
    assert_eq!(receiver.count(), 1);

    database.execute_here_as_superuser(REVEAL).await;
    receiver.wait_for(2).await;
    assert_eq!(program.api().get("/sending").await["stopped"], false);
    assert_eq!(diagnosis(&database)["verdict"], "ok");
}

#[tokio::test]
async fn a_copy_sends_nothing_where_the_identity_is_hidden_until_it_is_confirmed() {
    let database = Database::fresh().await;
    let receiver = Receiver::start().await;
    let mut original = Postrider::start(&database).await;
    original.api().acme(&receiver.url("/hook"), json!({})).await;
    emit(&original, "one").await;
    receiver.wait_for(1).await;
    assert!(original.stop().await.success());
    let copy = database.copy().await;
    copy.execute_here_as_superuser(HIDE).await;

    let program = Postrider::start(&copy).await;
    emit(&program, "two").await;
    assert_says_why(&program, &copy).await;
    assert_eq!(receiver.count(), 1);
    // Its identity can be read again: it is another one.
    copy.execute_here_as_superuser(REVEAL).await;
    until("it is known to be a copy", || async {
        let state = program.api().get("/sending").await;
        (state["restored"] == true && state["identity_hidden"] == false).then_some(())
    })
    .await;
    assert_eq!(
        diagnosis(&copy)["found"],
        "stopped: this database is a restored copy"
    );
    assert_eq!(receiver.count(), 1);

    // Confirmed while it is hidden: remembered by what can be seen.
    copy.execute_here_as_superuser(HIDE).await;
    let (status, state) = resume(&program, true).await;
    assert_eq!(
        (status, &state["stopped"]),
        (StatusCode::OK, &json!(false)),
        "{state}"
    );
    receiver.wait_for(2).await;
}

#[tokio::test]
async fn a_copy_is_found_where_the_identity_was_never_revealed() {
    let database = Database::empty().await;
    database.execute_here_as_superuser(HIDE).await;
    let receiver = Receiver::start().await;
    let mut original = Postrider::start(&database).await;
    original.api().acme(&receiver.url("/hook"), json!({})).await;
    emit(&original, "one").await;
    receiver.wait_for(1).await;
    let found = diagnosis(&database);
    assert_eq!(found["verdict"], "warning", "{found}");
    assert!(found["found"].as_str().expect("text").contains(WORDS), "{found}");
    assert!(original.stop().await.success());

    let copy = database.copy().await;
    let program = Postrider::start(&copy).await;
    emit(&program, "two").await;
    let state = program.api().get("/sending").await;
    assert_eq!(
        (&state["stopped"], &state["restored"]),
        (&json!(true), &json!(true)),
        "{state}"
    );
    assert_eq!(resume(&program, false).await.0, StatusCode::CONFLICT);
    assert_eq!(receiver.count(), 1);
    assert_eq!(resume(&program, true).await.0, StatusCode::OK);
    receiver.wait_for(2).await;

    // Once it is revealed, `migrate` remembers the original by it.
    database.execute_here_as_superuser(REVEAL).await;
    original.restart().await;
    assert_eq!(original.api().get("/sending").await["stopped"], false);
    let identity = "select identity from postrider.sending";
    assert!(!database.text(identity).await.starts_with("oids/"));
    assert_eq!(diagnosis(&database)["verdict"], "ok");
}
