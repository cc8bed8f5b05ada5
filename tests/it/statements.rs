//! SQL as text: which files may move a delivery, and whether every statement fits the schema.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use sqlx::{AssertSqlSafe, PgConnection};

use crate::support::Database;

/// Their rows are the state of a delivery.
const TABLES: [&str; 6] = [
    "queue",
    "retries",
    "attempts",
    "archived_attempts",
    "dead_letters",
    "dead_letter_counts",
];
const WRITES: [&str; 6] = [
    "insert into",
    "update",
    "update only",
    "delete from",
    "delete from only",
    "merge into",
];
/// May write them: the transitions, the functions that producers call, benchmarks and tests.
const WRITERS: [&str; 4] = ["dispatcher/src/store", "migrations", "bench", "tests"];
/// Whose statements are prepared.
const CRATES: [&str; 3] = ["dispatcher/src", "dashboard/src", "sender/src"];

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files with one of these endings, with their path below the root of the repository.
pub(crate) fn files(folder: &Path, endings: &[&str], found: &mut Vec<(PathBuf, String)>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    entries.sort();
    for path in entries {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        if path.is_dir() {
            if !name.starts_with('.') && name != "target" && name != "node_modules" {
                files(&path, endings, found);
            }
        } else if path
            .extension()
            .is_some_and(|ending| endings.iter().any(|wanted| ending == *wanted))
        {
            let text = fs::read_to_string(&path).expect("text");
            let below = path.strip_prefix(root()).expect("a path below the root");
            found.push((below.to_owned(), text));
        }
    }
}

/// The tables of a delivery's state that a text writes.
fn written(text: &str) -> BTreeSet<&'static str> {
    let words: Vec<String> = text
        .replace("\\\n", " ")
        .replace('"', " ")
        .split_whitespace()
        .map(str::to_lowercase)
        .collect();
    let text = words.join(" ");
    let mut tables = BTreeSet::new();
    for table in TABLES {
        for write in WRITES {
            let start = format!("{write} postrider.{table}");
            let is_whole = |at: usize| {
                !text[at + start.len()..].starts_with(|next: char| next.is_alphanumeric() || next == '_')
            };
            if text.match_indices(&start).any(|(at, _)| is_whole(at)) {
                tables.insert(table);
            }
        }
    }
    tables
}

#[test]
fn only_the_store_moves_deliveries() {
    let mut all = Vec::new();
    files(root(), &["rs", "sql"], &mut all);
    let is_writer = |path: &Path| WRITERS.iter().any(|writer| path.starts_with(writer));
    let wrong: Vec<String> = all
        .iter()
        .filter(|(path, _)| !is_writer(path))
        .map(|(path, text)| (path, written(text)))
        .filter(|(_, tables)| !tables.is_empty())
        .map(|(path, tables)| format!("{} writes {tables:?}", path.display()))
        .collect();
    assert!(
        wrong.is_empty(),
        "only dispatcher/src/store may write these tables:\n{}",
        wrong.join("\n")
    );
    // The scan sees the ones that are allowed to.
    let store: BTreeSet<&str> = all
        .iter()
        .filter(|(path, _)| path.starts_with("dispatcher/src/store"))
        .flat_map(|(_, text)| written(text))
        .collect();
    assert_eq!(store, BTreeSet::from(TABLES));
}

/// The value of the string literal that a text begins with; none when it begins with something else.
fn literal(text: &str) -> Option<String> {
    let mut value = String::new();
    let mut rest = text.strip_prefix('"')?.chars();
    loop {
        match rest.next()? {
            '"' => return Some(value),
            '\\' => match rest.next()? {
                'n' => value.push('\n'),
                't' => value.push('\t'),
                '\n' => rest = rest.as_str().trim_start().chars(),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
}

/// String literals that are statements. Those that are put together at run time are left out.
fn statements(text: &str) -> Vec<String> {
    let starts = ["select", "with", "insert into", "update", "delete from"];
    text.match_indices('"')
        .filter(|(at, _)| {
            let before = text[..*at].trim_end().trim_end_matches(['r', '#']);
            !before.ends_with("format!(") && !before.ends_with("concat!(")
        })
        .filter_map(|(at, _)| literal(&text[at..]))
        .filter(|value| {
            starts.iter().any(|start| {
                value
                    .strip_prefix(start)
                    .is_some_and(|rest| rest.starts_with(char::is_whitespace))
            })
        })
        .filter(|value| value.contains("postrider.") || value.contains("apalis."))
        .collect()
}

/// Types of parameters are inferred. One that can be of several needs a cast in the statement.
async fn prepare(connection: &mut PgConnection, statement: &str) -> Result<(), sqlx::Error> {
    for command in [format!("prepare one as {statement}"), "deallocate one".to_owned()] {
        sqlx::raw_sql(AssertSqlSafe(command))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_statement_fits_the_schema() {
    let database = Database::fresh().await;
    let mut connection = database.connect().await;
    let mut wrong = Vec::new();
    let mut stored = Vec::new();
    for folder in CRATES {
        files(&root().join(folder), &["sql"], &mut stored);
    }
    assert!(!stored.is_empty());
    for (path, statement) in &stored {
        if let Err(error) = prepare(&mut connection, statement).await {
            wrong.push(format!("{}: {error}", path.display()));
        }
    }
    let mut prepared = stored.len();
    for folder in CRATES {
        let mut sources = Vec::new();
        files(&root().join(folder), &["rs"], &mut sources);
        for (path, text) in &sources {
            for statement in statements(text) {
                // Of producers' own databases.
                if statement.contains("postrider.outbox") {
                    continue;
                }
                prepared += 1;
                if let Err(error) = prepare(&mut connection, &statement).await {
                    wrong.push(format!("{}: {error}\n{statement}", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(prepared > 200, "the scan found only {prepared} statements");
}
