//! A stranger's tool reads the API's own description and tries whatever that allows, and whatever it does not.

use std::process::Command;

use serde_json::json;

use crate::support::{ADMIN_API_KEY, Answer, Database, Postrider, Receiver, python};

/// A fixed seed: a test that fails now and then says nothing.
const SEED: &str = "8";
const EXAMPLES: &str = "6";

#[tokio::test]
async fn schemathesis_finds_no_server_error_and_no_status_that_is_not_described() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    let more = json!({ "retry_schedule": ["0s"] });
    let endpoint = api.acme(&receiver.url("/hook"), more).await;
    let event = json!({ "id": "evt_1", "type": "invoice.paid", "data": {}, "ordering_key": "a" });
    api.emit("acme", event).await;
    let dead = api.wait_for_state("acme", "dead", 1).await;
    let folder = tempfile::tempdir().expect("a folder");
    // With names that are there it gets further than with names alone.
    let settings = format!(
        "[parameters]\n\"path.tenant\" = \"acme\"\n\"path.type\" = \"invoice.paid\"\n\"path.event\" = \"evt_1\"\n\
         \"path.endpoint\" = \"{}\"\n\"path.delivery\" = {}\n",
        endpoint.id, dead[0]["id"]
    );
    std::fs::write(folder.path().join("known.toml"), settings).expect("written");
    std::fs::write(folder.path().join("unknown.toml"), "").expect("written");
    for (names, phases) in [("known.toml", "coverage,fuzzing"), ("unknown.toml", "fuzzing")] {
        let mut tool = Command::new(python().with_file_name("st"));
        tool.current_dir(folder.path())
            .args(["--config-file", names, "run"]);
        tool.arg(program.url("/openapi.json"));
        tool.args(["--header", &format!("Authorization: Bearer {ADMIN_API_KEY}")]);
        tool.args([
            "--checks",
            "not_a_server_error,status_code_conformance,content_type_conformance",
        ]);
        tool.args([
            "--max-examples",
            EXAMPLES,
            "--seed",
            SEED,
            "--workers",
            "1",
            "--no-color",
        ]);
        tool.args(["--phases", phases]);
        // Its answer goes on for as long as somebody reads it.
        tool.args(["--exclude-operation-id", "streamListenerRequests"]);
        // These would take away what the others need.
        for id in ["deleteTenant", "deleteEndpoint", "deleteEventType"] {
            if names == "known.toml" {
                tool.args(["--exclude-operation-id", id]);
            }
        }
        let output = tokio::task::spawn_blocking(move || tool.output())
            .await
            .expect("waited for")
            .expect("it runs");
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{names}: {told}\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    assert!(api.get("/tenants").await["data"].is_array(), "it still answers");
}
