//! `types export` and `types import`: files that say what is there, and become what is there.

use reqwest::{Method, StatusCode};
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
    assert!(
        done && told.contains("breaking change for consumers of"),
        "{told}"
    );
    assert_eq!(
        program.api().get("/event-types/invoice.paid").await["versions"][1],
        "v2"
    );
    let (done, told) = types(&program, "types import --apply .", folder.path());
    assert!(done && told.contains("Nothing to change"), "{told}");
}

#[tokio::test]
async fn a_long_number_goes_into_a_file_and_back_with_all_its_digits() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let long = "123456789012345678901234567890";
    let schema =
        format!(r#"{{"schemas":{{"v1":{{"properties":{{"n":{{"maximum":{long},"minimum":1.10}}}}}}}}}}"#);
    let put = |body: String| api.send(Method::PUT, "/event-types/a.b", Some(body));
    assert!(put(schema).await.0.is_success());
    let folder = tempfile::tempdir().expect("a folder");
    let (done, told) = types(&program, "types export .", folder.path());
    assert!(done, "{told}");
    let path = folder.path().join("a.b.json");
    let text = std::fs::read_to_string(&path).expect("a file");
    assert!(
        text.contains(&format!("\"maximum\": {long},\n")) && text.contains("1.10\n"),
        "{text}"
    );
    let (done, told) = types(&program, "types import .", folder.path());
    assert!(done && told.contains("Nothing to change"), "{told}");

    // One digit more is another schema, and that is known before anything is tried.
    std::fs::write(&path, text.replace(long, &format!("{long}1"))).expect("written");
    for arguments in ["types import .", "types import --apply ."] {
        let (done, told) = types(&program, arguments, folder.path());
        assert!(
            !done && told.contains("! version v1") && told.contains("Nothing was changed"),
            "{told}"
        );
    }
}

#[tokio::test]
async fn every_bad_file_is_named_and_nothing_is_changed_before_all_are_good() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    write("a.good.json", r#"{"schemas":{"v1":{}}}"#);
    write(
        "b.bad.json",
        r#"{"schemas":{"v1":{"properties":{"a":{"type":"strng"}}}}}"#,
    );
    write("c.twice.json", r#"{"schemas":{"v1":{"a":1,"a":2}}}"#);
    write("d.broken.json", r#"{"schemas":"#);
    write("Upper.json", r#"{"schemas":{"v1":{}}}"#);
    write("README.md", "no type");
    for arguments in ["types import .", "types import --apply ."] {
        let (done, told) = types(&program, arguments, folder.path());
        assert!(!done, "{told}");
        for words in [
            "a.good\n  + new type",
            "b.bad.json: /schemas/v1/properties/a/type: ",
            "c.twice.json: /schemas/v1/a: duplicate field",
            "d.broken.json: is not a valid event type",
            "Upper.json: invalid event type name",
            "Nothing was changed",
        ] {
            assert!(told.contains(words), "{words}: {told}");
        }
    }
    let (status, _) = program.api().call(Method::GET, "/event-types/a.good", None).await;
    assert_eq!(status, StatusCode::NOT_FOUND);

    // What only the server can refuse stops it, and it says where.
    for name in ["b.bad.json", "c.twice.json", "d.broken.json", "Upper.json"] {
        std::fs::remove_file(folder.path().join(name)).expect("removed");
    }
    let description = "x".repeat(2_000);
    write(
        "b.long.json",
        &format!(r#"{{"description":"{description}","schemas":{{"v1":{{}}}}}}"#),
    );
    let (done, told) = types(&program, "types import --apply .", folder.path());
    assert!(
        !done && told.contains("b.long.json: failed; 1 of 2 types were changed before it"),
        "{told}"
    );
}
