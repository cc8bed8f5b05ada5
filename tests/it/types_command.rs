//! `types export` and `types import`: files that say what is there, and become what is there.

use serde_json::{Value, json};

use crate::support::{ADMIN_API_KEY, Database, Launch, Postrider};

fn types(program: &Postrider, arguments: &'static str, directory: &std::path::Path) -> (bool, String) {
    let output = Launch::new(arguments)
        .set("POSTRIDER_URL", program.url(""))
        .set("POSTRIDER_API_KEY", ADMIN_API_KEY)
        .output_in(directory);
    let told = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&told).into_owned(),
    )
}

#[tokio::test]
async fn files_are_shown_then_applied_and_a_second_import_changes_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().event_type("invoice.paid").await;
    let folder = tempfile::tempdir().expect("a folder");
    let (done, told) = types(&program, "types export .", folder.path());
    assert!(done, "{told}");
    let file = folder.path().join("invoice.paid.json");
    let mut exported: Value =
        serde_json::from_str(&std::fs::read_to_string(&file).expect("a file")).expect("JSON");
    let (done, told) = types(&program, "types import .", folder.path());
    assert!(done && told.contains("Nothing to change"), "{told}");

    exported["schemas"]["v2"] = json!({"type": "object", "required": ["id"]});
    std::fs::write(&file, exported.to_string()).expect("written");
    let (done, told) = types(&program, "types import .", folder.path());
    assert!(
        done && told.contains("+ version v2") && told.contains("Nothing was changed"),
        "{told}"
    );
    assert_eq!(
        program.api().get("/event-types/invoice.paid").await["versions"][1],
        Value::Null
    );
    let (done, told) = types(&program, "types import --apply .", folder.path());
    assert!(done && told.contains("breaks readers"), "{told}");
    assert_eq!(
        program.api().get("/event-types/invoice.paid").await["versions"][1],
        "v2"
    );
    let (done, told) = types(&program, "types import --apply .", folder.path());
    assert!(done && told.contains("Nothing to change"), "{told}");
}
