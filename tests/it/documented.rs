//! Every command in README.md and docs/ is run: the blocks of a page as one script, on one system for all pages. What can't be
//! run here is in one list, each with its reason; a command that is neither run nor in the list fails the test.

use std::{fs, os::unix::fs::symlink, path::Path, process::Stdio, time::Duration};

use reqwest::Method;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

use crate::support::{Api, DataFolder, Database, Postrider, Received, Receiver, until};

/// The page, how the command begins, and why it is not run.
const NOT_RUN: [(&str, &str, &str); 25] = [
    (
        "README.md",
        "make ",
        "the test would run itself; each has a gate of its own",
    ),
    (
        "README.md",
        "postrider listen",
        "runs until it is stopped: tests/it/listen.rs",
    ),
    (
        "README.md",
        "export POSTRIDER_DATABASE_URL=",
        "stands for your database; the test sets its own",
    ),
    (
        "README.md",
        "postrider dashboard",
        "runs until it is stopped: tests/it/roles.rs",
    ),
    (
        "README.md",
        "postrider dispatcher",
        "runs until it is stopped: tests/it/roles.rs",
    ),
    (
        "docs/backup.md",
        "createdb",
        "the test has made an empty database",
    ),
    ("docs/benchmark.md", "make bench", "takes minutes"),
    (
        "docs/benchmark.md",
        "target/release/postrider-bench --only",
        "takes minutes",
    ),
    (
        "docs/benchmark.md",
        "target/release/postrider-bench --quick",
        "takes minutes",
    ),
    (
        "docs/benchmark.md",
        "target/release/postrider-bench --json",
        "takes minutes",
    ),
    (
        "docs/benchmark.md",
        "target/release/postrider-bench --profile",
        "takes minutes",
    ),
    (
        "docs/cells.md",
        "export POSTRIDER_",
        "stands for your databases: tests/it/cells.rs",
    ),
    (
        "docs/cells.md",
        "postrider cells add",
        "needs another server: tests/it/cells.rs",
    ),
    (
        "docs/cells.md",
        "postrider tenants move",
        "needs another cell: tests/it/moves.rs",
    ),
    (
        "docs/cells.md",
        "POSTRIDER_DATABASE_URL=",
        "runs until it is stopped: tests/it/cells.rs",
    ),
    (
        "docs/cli.md",
        "postrider listen",
        "runs until it is stopped: tests/it/listen.rs",
    ),
    (
        "docs/emitting.md",
        "grpcurl",
        "is not installed here; tests/it/grpc.rs makes the call",
    ),
    ("docs/quick-start.md", "make run", "the test has started it"),
    (
        "docs/quick-start.md",
        "target/release/postrider listen",
        "runs until it is stopped: tests/it/listen.rs",
    ),
    ("docs/reliability.md", "make chaos", "takes minutes"),
    ("docs/reliability.md", "make soak", "takes minutes"),
    ("docs/reliability.md", "make overload", "takes minutes"),
    ("docs/reliability.md", "make neighbours", "takes minutes"),
    ("docs/reliability.md", "make failover", "takes minutes"),
    ("docs/reliability.md", "make cells", "takes minutes"),
];

/// Commands that may end with another status than 0, and why.
const MAY_FAIL: [(&str, i32, &str); 3] = [
    (
        "postrider doctor",
        1,
        "no dispatcher runs on the database of the test",
    ),
    (
        "postrider probe",
        1,
        "the receiver of the test takes whatever it gets, and is told so",
    ),
    ("target/release/postrider probe", 1, "the same"),
];

/// Pages that make what they need by themselves.
const FROM_NOTHING: [&str; 3] = ["README.md", "docs/event-types.md", "docs/quick-start.md"];

const PAGE_TIME_MAX: Duration = Duration::from_secs(120);

#[derive(Debug)]
struct Page {
    name: String,
    blocks: Vec<String>,
}

fn pages() -> Vec<Page> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![root.join("README.md")];
    let docs = fs::read_dir(root.join("docs")).expect("a folder");
    let docs = docs.map(|entry| entry.expect("an entry").path());
    files.extend(docs.filter(|path| path.extension().is_some_and(|end| end == "md")));
    files.sort();
    let pages = files.iter().map(|path| {
        let name = path.strip_prefix(root).expect("below").display().to_string();
        let text = fs::read_to_string(path).expect("readable");
        Page {
            blocks: blocks(&text),
            name,
        }
    });
    pages.filter(|page| !page.blocks.is_empty()).collect()
}

/// What stands in fences that a shell is named for.
fn blocks(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Option<(bool, String)> = None;
    for line in text.lines() {
        let inner = line.trim_start();
        match (&mut open, inner.strip_prefix("```")) {
            (None, Some(language)) => {
                let is_shell = ["sh", "bash", "console", "shell"].contains(&language.trim());
                open = Some((is_shell, String::new()));
            }
            (Some(_), Some(_)) => {
                if let Some((true, block)) = open.take() {
                    found.push(block);
                }
                open = None;
            }
            (Some((_, block)), None) => {
                block.push_str(line);
                block.push('\n');
            }
            (None, None) => {}
        }
    }
    found
}

/// The commands of a block, each with the lines that belong to it.
fn commands(block: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut goes_on = false;
    let mut ends_with: Option<String> = None;
    let mut quotes = 0;
    for line in block.lines() {
        match found.last_mut() {
            Some(last) if goes_on || ends_with.is_some() || quotes % 2 == 1 => {
                last.push('\n');
                last.push_str(line);
            }
            _ => found.push(line.to_owned()),
        }
        if let Some(end) = &ends_with {
            if line.trim() == end {
                ends_with = None;
            }
            continue;
        }
        quotes += line.split(" #").next().unwrap_or(line).matches('\'').count();
        goes_on = line.ends_with('\\');
        if let Some((_, word)) = line.split_once("<<") {
            let word = word.trim().trim_matches(['\'', '"']);
            quotes = 0;
            ends_with = Some(word.to_owned());
        }
    }
    found.retain(|command| !command.trim().is_empty() && !command.trim_start().starts_with('#'));
    found
}

/// A system as a person has it who has followed the quick start up to `make run`.
struct System {
    folder: TempDir,
    program: Postrider,
    key: String,
    database: Database,
    empty: Database,
    outbox: Database,
    _data: DataFolder,
}

impl System {
    async fn start() -> Self {
        let (data, folder) = (DataFolder::new(), TempDir::new().expect("a folder"));
        let program = Postrider::embedded(&data).start().await;
        until("the banner is printed", || async {
            program.printed().contains("Press Ctrl-C to stop").then_some(())
        })
        .await;
        symlink(data.path(), folder.path().join(".postrider")).expect("linked");
        let release = folder.path().join("target/release");
        fs::create_dir_all(&release).expect("made");
        symlink(env!("CARGO_BIN_EXE_postrider"), release.join("postrider")).expect("linked");
        let key = fs::read_to_string(data.path().join("admin-api-key")).expect("a key");
        Self {
            key: key.trim().to_owned(),
            folder,
            program,
            database: Database::fresh().await,
            empty: Database::empty().await,
            outbox: Database::empty().await,
            _data: data,
        }
    }

    fn api(&self) -> Api {
        self.program.api_with_key(&self.key)
    }

    /// What a page's words stand for here.
    fn own_words(&self, text: &str, receiver: &Receiver, endpoint: &str) -> String {
        let address = receiver.url("").replace("http://", "");
        let here = self.program.url("");
        let words = [
            ("http://127.0.0.1:8080", here.as_str()),
            ("https://hooks.example.com", &here),
            ("https://postrider.example.com", &here),
            ("https://shop.example.com/hook", &receiver.url("/hook")),
            ("127.0.0.1:3000", &address),
            ("localhost:3000", &address),
            ("prk_…", &self.key),
            ("ep_…", endpoint),
            ("postgresql://…/billing", &self.outbox.url()),
            ("postgresql://…/shipping", &self.outbox.url()),
        ];
        words
            .into_iter()
            .fold(text.to_owned(), |text, (word, ours)| text.replace(word, ours))
    }

    async fn run(&self, page: &Page, script: &str, endpoint: &str) {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("sh");
        command
            .args(["-eu", "-c", script])
            .current_dir(self.folder.path())
            .env_clear()
            .env(
                "PATH",
                format!("{}:{path}", self.folder.path().join("target/release").display()),
            )
            .env("HOME", self.folder.path())
            .env("KEY", &self.key)
            .env("API", self.program.url("/v1"))
            .env("ENDPOINT", endpoint)
            // Where it is, and so also the key: the one in the data directory is for the usual address alone.
            .env("POSTRIDER_URL", self.program.url(""))
            .env("POSTRIDER_API_KEY", &self.key)
            .env("POSTRIDER_DATABASE_URL", self.database.url())
            .env("NEW_DATABASE_URL", self.empty.url())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let ended = tokio::time::timeout(PAGE_TIME_MAX, command.output()).await;
        let output = ended
            .unwrap_or_else(|_| panic!("{} takes too long:\n{script}", page.name))
            .expect("sh starts");
        assert!(
            output.status.success(),
            "{}: {}\n{script}\n--- it wrote\n{}\n{}",
            page.name,
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
    }

    /// A captured request and its secret, and certificates, as files that some pages speak of.
    fn write_files(&self, received: &Received, secret: &str) {
        let folder = self.folder.path();
        let headers: String = received
            .headers
            .iter()
            .map(|(name, value)| format!("{name}: {}\n", value.to_str().expect("plain")))
            .collect();
        let key = rcgen::KeyPair::generate().expect("a key");
        let mut parameters = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = parameters.self_signed(&key).expect("signed").pem();
        let private = key.serialize_pem();
        for (name, bytes) in [
            ("headers.txt", headers.as_bytes()),
            ("body.json", &received.body),
            ("secret.txt", secret.as_bytes()),
            ("ca.pem", certificate.as_bytes()),
            ("client.pem", certificate.as_bytes()),
            ("client.key", private.as_bytes()),
        ] {
            fs::write(folder.join(name), bytes).expect("written");
        }
    }

    /// Endpoints are taken away: the next page makes its own.
    async fn clear(&self) {
        let api = self.api();
        let list = api.get("/tenants/acme/endpoints").await;
        for endpoint in list["data"].as_array().expect("a list") {
            let path = format!(
                "/tenants/acme/endpoints/{}",
                endpoint["id"].as_str().expect("an id")
            );
            api.call(Method::DELETE, &path, None).await;
        }
    }
}

/// What is run of a page; the places in `NOT_RUN` that were met are noted.
fn script(page: &Page, met: &mut [bool]) -> String {
    let mut script = "curl() { command curl --fail-with-body \"$@\"; }\n".to_owned();
    for command in page.blocks.iter().flat_map(|block| commands(block)) {
        let begins = |start: &str| command.trim_start().starts_with(start);
        let listed = NOT_RUN
            .iter()
            .position(|(name, start, _)| *name == page.name && begins(start));
        if let Some(place) = listed {
            met[place] = true;
            continue;
        }
        script.push_str(command.split(" #").next().unwrap_or(&command).trim_end());
        if let Some((_, status, _)) = MAY_FAIL.iter().find(|(start, ..)| begins(start)) {
            script.push_str(&format!(" || [ $? -eq {status} ]"));
        }
        script.push('\n');
    }
    script
}

#[tokio::test]
async fn every_command_of_the_docs_is_run() {
    let system = System::start().await;
    let mut met = [false; NOT_RUN.len()];
    let pages = pages();
    assert!(pages.len() > 10, "{}", pages.len());
    for page in &pages {
        // Each page has a receiver of its own, and so an address that no other endpoint has.
        let receiver = Receiver::start().await;
        let script = script(page, &mut met);
        let (mut endpoint, api) = (String::new(), system.api());
        if !FROM_NOTHING.contains(&page.name.as_str()) {
            api.tenant("acme").await;
            // The schema that all pages give it: a published version stays what it is.
            let schema =
                json!({ "type": "object", "required": ["id"], "properties": { "id": { "type": "string" } } });
            let body = json!({ "schemas": { "2026-01-15": schema } });
            let (status, told) = api
                .call(Method::PUT, "/event-types/invoice.paid", Some(body))
                .await;
            assert!(status.is_success(), "{told}");
            let made = api.endpoint("acme", &receiver.url("/hook"), json!({})).await;
            let event = json!({ "type": "invoice.paid", "data": { "id": "inv_1" } });
            let (status, told): (_, Value) = api.emit("acme", event).await;
            assert!(status.is_success(), "{told}");
            let received = receiver.wait_for(1).await;
            system.write_files(&received[0], &made.secret);
            endpoint = made.id;
        }
        let script = system.own_words(&script, &receiver, &endpoint);
        assert!(
            !script.contains('…'),
            "{} leaves something out:\n{script}",
            page.name
        );
        system.run(page, &script, &endpoint).await;
        system.clear().await;
    }
    for ((page, start, reason), met) in NOT_RUN.iter().zip(met) {
        assert!(
            met,
            "{page} has no command `{start}` any more, which is not run because: {reason}"
        );
        assert!(!reason.is_empty());
    }
}

#[test]
fn commands_are_told_apart() {
    let block = "one 'a\nb' \\\n  c\n\n# a remark\ntwo <<'SQL'\nthree\nSQL\nfour   # why\n";
    assert_eq!(
        commands(block),
        ["one 'a\nb' \\\n  c", "two <<'SQL'\nthree\nSQL", "four   # why"]
    );
    let text = "a\n```sh\none\n```\n```json\n{}\n```\n  ```sh\n  two\n  ```\n";
    assert_eq!(blocks(text), ["one\n", "  two\n"]);
}
