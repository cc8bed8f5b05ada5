//! The tools for people, as they are typed: what they do, what they write, and with which status they end.

use reqwest::Method;
use serde_json::json;

use crate::support::{Answer, Database, Postrider, Receiver, RunningTool, tool, tool_with};

async fn started(database: &Database) -> Postrider {
    let program = Postrider::start_with(database, &[("POSTRIDER_RETRY_SCHEDULE", "0s")]).await;
    program.api().tenant("acme").await;
    let schema = json!({"type": "object", "required": ["amount"], "properties": {"amount": {"type": "integer", "minimum": 5}}});
    let (status, answer) = program
        .api()
        .call(
            Method::PUT,
            "/event-types/invoice.paid",
            Some(json!({"schemas": {"v1": schema}})),
        )
        .await;
    assert!(status.is_success(), "{answer}");
    program
}

#[tokio::test]
async fn emit_makes_up_data_that_the_schema_takes_or_sends_what_it_is_given() {
    let database = Database::fresh().await;
    let program = started(&database).await;
    // The one tenant there is need not be named.
    let made_up = tool(&program, &["emit", "invoice.paid", "--json"]).await;
    assert_eq!(made_up.status, 0, "{made_up:?}");
    assert_eq!(made_up.json()["data"]["amount"], 5);
    let given = tool(
        &program,
        &[
            "emit",
            "invoice.paid",
            "--data",
            r#"{ "amount":70 }"#,
            "--id",
            "e1",
        ],
    )
    .await;
    assert!(
        given.status == 0 && given.out.contains("e1 invoice.paid v1"),
        "{given:?}"
    );
    // Not a terminal: no colours.
    assert!(!given.out.contains('\u{1b}'));

    let wrong = tool(&program, &["emit", "invoice.paid", "--data", r#"{"amount":1}"#]).await;
    assert!(
        wrong.status == 1 && wrong.err.contains("/data/amount"),
        "{wrong:?}"
    );
    let wrong = tool(
        &program,
        &["emit", "invoice.paid", "--data", r#"{"amount":1}"#, "--json"],
    )
    .await;
    let problem: serde_json::Value = serde_json::from_str(wrong.err.trim()).expect("a problem");
    assert_eq!(
        (&problem["status"], &problem["errors"][0]["pointer"]),
        (&json!(422), &json!("/data/amount"))
    );
    let no_type = tool(&program, &["emit", "no.such"]).await;
    assert!(
        no_type.status == 1 && no_type.err.contains("event type does not exist"),
        "{no_type:?}"
    );
    let no_json = tool(&program, &["emit", "invoice.paid", "--data", "[1]"]).await;
    assert!(no_json.err.contains("not a JSON object"), "{no_json:?}");
}

#[tokio::test]
async fn what_goes_wrong_comes_with_what_helps() {
    let database = Database::fresh().await;
    let program = started(&database).await;
    let list = ["endpoints", "list"];
    let bad_key = tool_with(&program, &list, &[("POSTRIDER_API_KEY", "prk_wrong")]).await;
    assert!(
        bad_key.status == 1 && bad_key.err.contains("Set POSTRIDER_API_KEY"),
        "{bad_key:?}"
    );
    let no_key = tool_with(&program, &list, &[("POSTRIDER_API_KEY", "")]).await;
    assert!(
        no_key.status == 1 && no_key.err.contains("POSTRIDER_API_KEY_FILE"),
        "{no_key:?}"
    );
    let nobody = tool_with(&program, &list, &[("POSTRIDER_URL", "http://127.0.0.1:1")]).await;
    assert!(
        nobody.status == 1 && nobody.err.contains("Is Postrider running there?"),
        "{nobody:?}"
    );
    program.api().tenant("umbrella").await;
    let whose = tool(&program, &list).await;
    assert!(
        whose.err.contains("--tenant") && whose.err.contains("acme, umbrella"),
        "{whose:?}"
    );
    assert_eq!(tool(&program, &["endpoints", "lst"]).await.status, 2);
}

#[tokio::test]
async fn endpoints_are_made_tried_paused_and_deleted_by_id_or_url() {
    let database = Database::fresh().await;
    let program = started(&database).await;
    let receiver = Receiver::start().await;
    let url = receiver.url("/hook");
    let made = tool(
        &program,
        &["endpoints", "create", &url, "--types", "invoice.*,a.b", "--json"],
    )
    .await
    .json();
    let id = made["id"].as_str().expect("an id");
    assert_eq!(made["types"], json!(["invoice.*", "a.b"]));

    let test = tool(&program, &["endpoints", "test", &url, "--json"]).await;
    assert_eq!(
        (test.status, &test.json()["status"]),
        (0, &json!(204)),
        "{test:?}"
    );
    receiver.answer(Answer::Status(500));
    let test = tool(&program, &["endpoints", "test", id]).await;
    assert!(test.status == 1 && test.out.contains("500"), "{test:?}");

    let rotated = tool(
        &program,
        &["secrets", "rotate", &url, "--overlap", "2h", "--json"],
    )
    .await
    .json();
    assert_eq!(rotated["data"][0]["state"], "current");
    assert_eq!(rotated["data"][1]["secret"], made["secret"]);

    assert!(
        tool(&program, &["endpoints", "pause", &url])
            .await
            .out
            .contains("paused")
    );
    assert!(
        tool(&program, &["endpoints", "list"])
            .await
            .out
            .contains("paused")
    );
    assert_eq!(
        tool(&program, &["endpoints", "resume", id, "--json"])
            .await
            .json()["state"],
        "active"
    );
    assert_eq!(tool(&program, &["endpoints", "delete", id]).await.status, 0);
    let gone = tool(&program, &["endpoints", "pause", &url]).await;
    assert!(
        gone.status == 1 && gone.err.contains("postrider endpoints create"),
        "{gone:?}"
    );
}

#[tokio::test]
async fn events_are_shown_as_they_come() {
    let database = Database::fresh().await;
    let program = started(&database).await;
    for n in 0..3 {
        let event = json!({"type": "invoice.paid", "data": {"amount": 10 + n}, "id": format!("old{n}")});
        program.api().emit("acme", event).await;
    }
    let last = tool(&program, &["events", "tail", "-n", "2", "--no-follow"]).await;
    let lines: Vec<&str> = last.out.lines().collect();
    assert!(
        lines.len() == 2 && lines[0].contains("old1") && lines[1].contains("old2"),
        "{last:?}"
    );
    let mut tail = RunningTool::start(&program, &["events", "tail", "-n", "1", "--json"], &[]);
    assert_eq!(tail.json_line().await["id"], "old2");
    program
        .api()
        .emit(
            "acme",
            json!({"type": "invoice.paid", "data": {"amount": 99}, "id": "new"}),
        )
        .await;
    let event = tail.json_line().await;
    assert_eq!(
        (&event["id"], &event["data"]["amount"]),
        (&json!("new"), &json!(99))
    );
}

#[tokio::test]
async fn a_dead_letter_is_replayed() {
    let database = Database::fresh().await;
    let program = started(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    program
        .api()
        .endpoint("acme", &receiver.url("/"), json!({}))
        .await;
    program
        .api()
        .emit("acme", json!({"type": "invoice.paid", "data": {"amount": 9}}))
        .await;
    let dead = program.api().wait_for_state("acme", "dead", 1).await;
    receiver.answer(Answer::Status(204));
    let id = dead[0]["id"].as_str().expect("an id");
    let again = tool(&program, &["replay", id]).await;
    assert!(
        again.status == 0 && again.out.contains("pending again"),
        "{again:?}"
    );
    program.api().wait_for_state("acme", "delivered", 1).await;
    let none = tool(&program, &["replay", "dlv_nothing"]).await;
    assert!(
        none.status == 1 && none.err.contains("delivery does not exist"),
        "{none:?}"
    );
}

#[tokio::test]
async fn many_are_counted_before_they_are_replayed() {
    let database = Database::fresh().await;
    let program = started(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let url = receiver.url("/");
    program.api().endpoint("acme", &url, json!({})).await;
    for _ in 0..3 {
        program
            .api()
            .emit("acme", json!({"type": "invoice.paid", "data": {"amount": 9}}))
            .await;
    }
    program.api().wait_for_state("acme", "dead", 3).await;
    receiver.answer(Answer::Status(204));
    let counted = tool(&program, &["replay", "--endpoint", &url]).await;
    assert!(
        counted.status == 0 && counted.out.contains("3 deliveries will be replayed"),
        "{counted:?}"
    );
    assert_eq!(receiver.count(), 3);
    let sent = tool(&program, &["replay", "--endpoint", &url, "--yes", "--json"]).await;
    assert_eq!((sent.status, &sent.json()["done"]), (0, &json!(3)), "{sent:?}");
    assert_eq!(sent.json()["state"], "done");
    program.api().wait_for_state("acme", "delivered", 3).await;
}

#[tokio::test]
async fn a_probe_ends_with_the_status_that_a_build_needs() {
    let database = Database::fresh().await;
    let program = started(&database).await;
    let receiver = Receiver::start().await;
    let url = receiver.url("/");
    let stranger = tool(&program, &["probe", &url]).await;
    assert!(
        stranger.status == 1 && stranger.err.contains("Only registered endpoints"),
        "{stranger:?}"
    );
    assert_eq!(receiver.count(), 0);

    let endpoint = program.api().endpoint("acme", &url, json!({})).await;
    let trusting = tool(&program, &["probe", &url]).await;
    assert_eq!(trusting.status, 1, "{trusting:?}");
    assert!(
        trusting.out.contains("✗ Rejects a request without a signature"),
        "{}",
        trusting.out
    );
    assert!(trusting.out.contains("respond with 401"), "{}", trusting.out);

    let secret = endpoint.secret.clone();
    receiver.decide(move |request| {
        let good = request.headers.contains_key("webhook-signature") && request.verify(&secret).is_ok();
        Answer::Status(if good { 204 } else { 401 })
    });
    let right = tool(&program, &["probe", &endpoint.id, "--json"]).await;
    assert_eq!(
        (right.status, &right.json()["passed"]),
        (0, &json!(true)),
        "{right:?}"
    );
}

#[tokio::test]
async fn shells_can_complete_every_tool() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let script = tool(&program, &["completions", "bash", "--json"]).await;
    assert_eq!(script.json()["shell"], "bash");
    assert!(
        script.json()["script"]
            .as_str()
            .is_some_and(|text| text.contains("emit"))
    );
    for shell in ["bash", "zsh", "fish"] {
        let said = tool(&program, &["completions", shell]).await;
        assert_eq!(said.status, 0);
        for name in [
            "emit",
            "listen",
            "probe",
            "replay",
            "endpoints",
            "secrets",
            "types",
        ] {
            assert!(said.out.contains(name), "{name} in {shell}");
        }
    }
}

#[tokio::test]
async fn a_reader_that_stops_is_no_fault() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_postrider"))
        .arg("openapi")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    // More is written than a pipe holds.
    drop(child.stdout.take());
    let ended = child.wait_with_output().expect("it ends");
    assert_eq!(ended.status.code(), Some(141));
    assert!(
        ended.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&ended.stderr)
    );
}
