//! The list of attacks in `docs/threats.md`: every row names a test, and the test is there. And what no request can show:
//! how the code is written where that is the guard.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

const ROWS: [(char, usize); 6] = [('A', 44), ('B', 14), ('C', 22), ('D', 10), ('E', 19), ('F', 10)];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files of Rust below a folder, with their text.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = fs::read_to_string(&path).expect("readable");
                found.push((path, text));
            }
        }
    }
    found
}

/// The code of a file without its tests and its remarks.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    text.lines().filter(is_code).collect::<Vec<_>>().join("\n")
}

/// Each test as `module::name`. The module is that of the file; `settings/tests.rs` holds those of `settings.rs`.
fn tests() -> BTreeSet<String> {
    let folders = [
        "tests/it",
        "dispatcher/src",
        "dashboard/src",
        "proto/src",
        "sender/src",
        "src",
    ];
    let mut names = BTreeSet::new();
    for (path, text) in folders.iter().flat_map(|folder| sources(folder)) {
        let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let module = match stem(&path).as_deref() {
            Some("tests" | "mod") => path.parent().and_then(stem),
            other => other.map(ToOwned::to_owned),
        };
        let module = module.expect("a name");
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            let function = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
            if line.starts_with("#[tokio::test") || line == "#[test]" {
                is_test = true;
            } else if let Some(function) = function {
                if is_test {
                    let name = function.split('(').next().unwrap_or_default();
                    names.insert(format!("{module}::{name}"));
                }
                is_test = false;
            }
        }
    }
    names
}

#[test]
fn every_row_of_the_list_names_a_test_that_there_is() {
    let list = fs::read_to_string(root().join("docs/threats.md")).expect("the list");
    let mut rows = BTreeMap::new();
    for line in list.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [row, attack, test] = cells.as_slice() else {
            panic!("a row has three cells: {line}");
        };
        if *row == "row" {
            continue;
        }
        assert!(!attack.is_empty(), "{line}");
        let test = test.trim_matches('`').to_owned();
        assert!(
            rows.insert((*row).to_owned(), test).is_none(),
            "{row} is there twice"
        );
    }
    let wanted: BTreeSet<String> = ROWS
        .iter()
        .flat_map(|(letter, count)| (1..=*count).map(move |n| format!("{letter}{n}")))
        .collect();
    assert_eq!(rows.keys().cloned().collect::<BTreeSet<_>>(), wanted);
    let there = tests();
    assert!(there.len() > 400, "{}", there.len());
    let missing: Vec<_> = rows.iter().filter(|(_, test)| !there.contains(*test)).collect();
    assert!(missing.is_empty(), "no such test: {missing:#?}");
}

/// A43: whoever fetches beside the guarded client is a way around it.
#[test]
fn connections_to_strangers_are_opened_in_one_place() {
    const WAYS_OUT: [&str; 5] = [
        "TcpStream::connect",
        "reqwest",
        "TcpSocket",
        "HttpConnector",
        "lookup_host",
    ];
    let mut found = Vec::new();
    for (path, text) in ["dispatcher/src", "dashboard/src", "sender/src", "proto/src"]
        .iter()
        .flat_map(|folder| sources(folder))
        .filter(|(path, _)| {
            !path
                .components()
                .any(|part| part.as_os_str() == "tests" || part.as_os_str() == "tests.rs")
        })
    {
        let code = code(&text);
        for way in WAYS_OUT.iter().filter(|way| code.contains(**way)) {
            let path = path.strip_prefix(root()).expect("below").display();
            found.push(format!("{path}: {way}"));
        }
    }
    assert_eq!(
        found,
        ["dispatcher/src/http/client/connect.rs: TcpStream::connect"]
    );
}

/// F9, and the tokens of sessions and of the API: how long a wrong one takes must not tell how much of it is right.
#[test]
fn secrets_are_compared_in_constant_time() {
    for (file, count) in [
        ("proto/src/signature/verify.rs", 2),
        ("dashboard/src/auth/mod.rs", 1),
        ("dashboard/src/auth/session.rs", 2),
        // Verifies with the functions of the first.
        ("proto/src/signature/diagnose.rs", 0),
    ] {
        let code = code(&fs::read_to_string(root().join(file)).expect("readable"));
        assert_eq!(code.matches(".ct_eq(").count(), count, "{file}");
        for compared in [
            "== expected",
            "expected ==",
            "== csrf",
            "== hash",
            "eq(&expected)",
        ] {
            let by_bytes = code.replace("ct_eq(&expected)", "");
            assert!(!by_bytes.contains(compared), "{file}: {compared}");
        }
    }
}
