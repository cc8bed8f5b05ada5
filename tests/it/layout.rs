//! Files and functions that fit a reader: no file over 500 lines, no function over 80. Tests, simulations and generated code are exempt.

use std::path::Path;

use crate::statements::{files, root};

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 80;
const CRATES: [&str; 9] = [
    "src",
    "proto",
    "sender",
    "dispatcher",
    "dashboard",
    "client",
    "cli",
    "embedded",
    "bench",
];

fn is_exempt(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with("tests.rs")
        || name.ends_with("_simulation.rs")
        || path.iter().any(|part| part == "tests" || part == "generated")
}

fn indent(line: &str) -> &str {
    &line[..line.len() - line.trim_start().len()]
}

/// The lines outside of test modules.
fn code(text: &str) -> Vec<&str> {
    let mut lines = text.lines().peekable();
    let mut kept = Vec::new();
    while let Some(line) = lines.next() {
        let is_module = |next: &&str| next.contains("mod ") && next.ends_with('{');
        if line.trim() == "#[cfg(test)]" && lines.peek().is_some_and(is_module) {
            let end = format!("{}}}", indent(line));
            lines.find(|line| *line == end);
        } else {
            kept.push(line);
        }
    }
    kept
}

/// The name of the function that begins on this line.
fn function(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let is_qualifier = |word: &str| word.starts_with("pub") || ["const", "async", "unsafe"].contains(&word);
    before
        .split_whitespace()
        .all(is_qualifier)
        .then(|| after.split(['(', '<']).next())
        .flatten()
}

/// Functions with their lengths. One without a body, or on one line, has none.
fn functions<'t>(lines: &[&'t str]) -> Vec<(&'t str, usize)> {
    let begins = lines.iter().enumerate();
    begins
        .filter_map(|(at, line)| {
            let (name, end) = (function(line)?, format!("{}}}", indent(line)));
            if line.ends_with('}') {
                return None;
            }
            let is_over = |rest: &&str| *rest == end || indent(rest) == indent(line) && rest.ends_with(';');
            Some((name, lines[at..].iter().position(is_over)? + 1))
        })
        .collect()
}

#[test]
fn files_and_functions_fit_a_reader() {
    let mut sources = Vec::new();
    for name in CRATES {
        files(&root().join(name), &["rs"], &mut sources);
    }
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for (path, text) in sources.iter().filter(|(path, _)| !is_exempt(path)) {
        let lines = code(text);
        if lines.len() > FILE_LINES_MAX {
            wrong.push(format!("{}: {} lines", path.display(), lines.len()));
        }
        for (name, length) in functions(&lines) {
            seen += 1;
            if length > FUNCTION_LINES_MAX {
                wrong.push(format!("{}: {name} has {length} lines", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "split these:\n{}", wrong.join("\n"));
    assert!(seen > 1_000, "the scan found only {seen} functions");
}

#[test]
fn lengths_are_counted_without_tests() {
    let text = "pub(crate) async fn one(\n    a: u8,\n) {\n    a;\n}\n\n    fn declared(&self);\n    fn short() {}\n\
                #[cfg(test)]\nmod tests {\n    fn hidden() {\n    }\n}\nconst fn last() {\n}\n";
    let lines = code(text);
    assert_eq!(lines.len(), 10);
    assert_eq!(functions(&lines), [("one", 5), ("declared", 1), ("last", 2)]);
}
