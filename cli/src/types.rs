//! `types export` and `types import`: a team's event types as files in its own repository, one per type.
//! Invariant: an import shows its changes before it makes any, makes none while a file is invalid, and is idempotent.

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, ensure};
use clap::{Args, Subcommand};
use postrider_client::{Client, EventType, EventTypeSettings, PageOf};
use postrider_proto::{
    json::{find_duplicate, is_same, lay_out, pointer_part},
    limits::VERSIONS_PER_TYPE_MAX,
    routing::{RESERVED_PREFIX, is_type_name, is_version},
};
use postrider_sender::{Schema, Violation};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json, value::RawValue};

use crate::{
    output::{self, json_line, progress},
    reach::{Failure, Reach},
    settings::Environment,
};

const PAGE: u32 = 1_000;
const FILES_MAX: usize = 10_000;
const FILE_BYTES_MAX: u64 = 1024 * 1024;

#[derive(Subcommand)]
pub enum TypesCommand {
    /// Write each event type to DIRECTORY as <type>.json
    Export(ExportArguments),
    /// Show how the files in DIRECTORY differ from the server, and apply the changes with --apply
    Import(ImportArguments),
}

#[derive(Args)]
pub struct ExportArguments {
    directory: PathBuf,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct ImportArguments {
    directory: PathBuf,
    /// Apply the changes
    #[arg(long)]
    apply: bool,
    #[command(flatten)]
    reach: Reach,
}

/// The contents of a type's file. The file is named after the type.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TypeFile {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    thin: bool,
    /// As text: parsing would lose digits of long numbers.
    schemas: BTreeMap<String, Box<RawValue>>,
}

/// Why a file is not a valid event type.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct FileFault {
    file: String,
    pointer: String,
    detail: String,
}

impl fmt::Display for FileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pointer.as_str() {
            "" => write!(f, "{}: {}", self.file, self.detail),
            pointer => write!(f, "{}: {pointer}: {}", self.file, self.detail),
        }
    }
}

#[derive(Default)]
struct Folder {
    types: BTreeMap<String, TypeFile>,
    faults: Vec<FileFault>,
}

/// What an import would change in one type.
#[derive(Debug, Default, PartialEq, Eq)]
struct Differences {
    lines: Vec<String>,
    /// A published version differs, which no import can change.
    conflict: bool,
}

pub(crate) async fn run(command: TypesCommand, environment: &Environment) -> Result<ExitCode, Failure> {
    let reach = match &command {
        TypesCommand::Export(arguments) => &arguments.reach,
        TypesCommand::Import(arguments) => &arguments.reach,
    };
    let done = async {
        let client = reach.client(environment)?;
        match &command {
            TypesCommand::Export(arguments) => export(&client, arguments).await,
            TypesCommand::Import(arguments) => import(&client, arguments).await,
        }
    };
    done.await.map_err(|error| reach.failure(error))
}

async fn export(client: &Client, arguments: &ExportArguments) -> anyhow::Result<ExitCode> {
    let directory = &arguments.directory;
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let types = read_types(client).await?;
    for (name, file) in &types {
        let path = directory.join(format!("{name}.json"));
        let text = format!("{}\n", lay_out(&serde_json::to_string(file)?));
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let written = json!({"written": types.keys().collect::<Vec<_>>()});
    output::show(arguments.reach.json, &written, || {
        println!(
            "{} written to {}",
            count(types.len(), "type"),
            directory.display()
        );
    });
    Ok(ExitCode::SUCCESS)
}

async fn import(client: &Client, arguments: &ImportArguments) -> anyhow::Result<ExitCode> {
    let files = read_files(&arguments.directory)?;
    let there = read_types(client).await?;
    let changed: BTreeMap<&String, Differences> = files
        .types
        .iter()
        .map(|(name, file)| (name, differences(there.get(name), file)))
        .filter(|(_, differences)| !differences.lines.is_empty())
        .collect();
    let lines: BTreeMap<&String, &Vec<String>> =
        changed.iter().map(|(name, one)| (*name, &one.lines)).collect();
    let without_file: Vec<&String> = there.keys().filter(|name| !files.has(name)).collect();
    let is_bad = !files.faults.is_empty() || changed.values().any(|one| one.conflict);
    let apply = arguments.apply && !is_bad;
    if !arguments.reach.json {
        show(&lines, &without_file, &files.faults);
    }
    let mut reports = Vec::new();
    if apply {
        let bar = progress(changed.len() as u64, "changing types");
        for name in changed.keys() {
            let Some(file) = files.types.get(*name) else {
                continue;
            };
            let settings = EventTypeSettings {
                description: file.description.clone().map(Some),
                thin: Some(file.thin),
                schemas: file.schemas.clone(),
            };
            let put = client.put_event_type(name, &settings).await;
            reports.push(put.with_context(|| {
                let path = arguments.directory.join(format!("{name}.json"));
                let (done, all) = (reports.len(), changed.len());
                format!(
                    "{}: failed; {done} of {all} types were changed before it",
                    path.display()
                )
            })?);
            bar.inc(1);
        }
        bar.finish_and_clear();
    }
    let status = if is_bad {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    };
    if arguments.reach.json {
        json_line(&json!({
            "changes": lines, "applied": apply, "without_file": without_file, "types": reports,
            "faults": files.faults,
        }));
        return Ok(status);
    }
    for report in &reports {
        show_breaks(report);
    }
    match (changed.len(), arguments.apply) {
        _ if is_bad => println!("Nothing was changed: fix the lines marked with ! first."),
        (0, _) => println!("Nothing to change."),
        (_, false) => println!("Nothing was changed. Run again with --apply to make these changes."),
        (changed, true) => println!("{} changed.", count(changed, "type")),
    }
    Ok(status)
}

/// "1 type", "2 types"
fn count(number: usize, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

fn show(changed: &BTreeMap<&String, &Vec<String>>, without_file: &[&String], faults: &[FileFault]) {
    for (name, lines) in changed {
        println!("{name}");
        for line in *lines {
            println!("  {line}");
        }
    }
    for name in without_file {
        println!("{name}\n  exists on the server but has no file: left unchanged");
    }
    for fault in faults {
        println!("! {fault}");
    }
}

fn show_breaks(changed: &EventType) {
    for report in &changed.compatibility {
        for one in &report.breaking_changes {
            println!(
                "{} {}: breaking change for consumers of {}: {} {}",
                changed.r#type, report.version, report.previous_version, one.pointer, one.detail
            );
        }
    }
}

fn differences(there: Option<&TypeFile>, file: &TypeFile) -> Differences {
    let mut found = Differences::default();
    let Some(there) = there else {
        found.lines.push("+ new type".to_owned());
        let versions = file.schemas.keys().map(|version| format!("+ version {version}"));
        found.lines.extend(versions);
        return found;
    };
    // A file without a description leaves the stored one as it is.
    if let Some(description) = &file.description
        && there.description.as_ref() != Some(description)
    {
        found.lines.push(format!(
            "~ description: {:?} → {description:?}",
            there.description.as_deref().unwrap_or_default(),
        ));
    }
    if there.thin != file.thin {
        found
            .lines
            .push(format!("~ thin: {} → {}", there.thin, file.thin));
    }
    for (version, schema) in &file.schemas {
        match there.schemas.get(version) {
            None => found.lines.push(format!("+ version {version}")),
            Some(published) if !is_same(published.get(), schema.get()) => {
                found.conflict = true;
                found.lines.push(format!(
                    "! version {version} differs from the published schema, which cannot be changed"
                ));
            }
            Some(_) => {}
        }
    }
    found
}

/// Checks every file, even after one that is invalid.
fn read_files(directory: &Path) -> anyhow::Result<Folder> {
    let mut folder = Folder::default();
    let entries = fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        ensure!(
            paths.len() < FILES_MAX,
            "{} has more than {FILES_MAX} files",
            directory.display()
        );
        paths.push(path);
    }
    paths.sort();
    for path in paths {
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(name) = name.and_then(|name| name.strip_suffix(".json")) else {
            continue;
        };
        folder.add(name, &path);
    }
    Ok(folder)
}

impl Folder {
    fn has(&self, name: &str) -> bool {
        let path = format!("{name}.json");
        let is_of = |fault: &FileFault| Path::new(&fault.file).ends_with(&path);
        self.types.contains_key(name) || self.faults.iter().any(is_of)
    }

    fn add(&mut self, name: &str, path: &Path) {
        let read = || -> Result<TypeFile, (String, String)> {
            let whole = |detail: String| (String::new(), detail);
            let length = fs::metadata(path)
                .map_err(|error| whole(format!("cannot be read: {error}")))?
                .len();
            if length > FILE_BYTES_MAX {
                return Err(whole(format!(
                    "is too large. The limit is {FILE_BYTES_MAX} bytes"
                )));
            }
            let text = fs::read_to_string(path).map_err(|error| whole(format!("cannot be read: {error}")))?;
            if let Some(pointer) = find_duplicate(&text) {
                return Err((pointer, "duplicate field".to_owned()));
            }
            serde_json::from_str(&text).map_err(|error| whole(format!("is not a valid event type: {error}")))
        };
        let wrong = match read() {
            Err(wrong) => vec![wrong],
            Ok(file) => {
                let wrong = check(name, &file);
                if wrong.is_empty() {
                    self.types.insert(name.to_owned(), file);
                }
                wrong
            }
        };
        self.faults
            .extend(wrong.into_iter().map(|(pointer, detail)| FileFault {
                file: path.display().to_string(),
                pointer,
                detail,
            }));
    }
}

/// What the server would reject, by JSON pointer, so that it is known before anything is changed.
fn check(name: &str, file: &TypeFile) -> Vec<(String, String)> {
    let mut wrong = Vec::new();
    if !is_type_name(name) || name.starts_with(RESERVED_PREFIX) {
        let detail = "invalid event type name: use words of a-z, 0-9 and _ separated by dots, not starting with postrider.";
        wrong.push((String::new(), detail.to_owned()));
    }
    if file.schemas.is_empty() || file.schemas.len() > VERSIONS_PER_TYPE_MAX {
        wrong.push((
            "/schemas".to_owned(),
            format!("must have 1 to {VERSIONS_PER_TYPE_MAX} versions"),
        ));
    }
    for (version, schema) in &file.schemas {
        let pointer = format!("/schemas/{}", pointer_part(version));
        if !is_version(version) {
            let detail = "invalid version: must start with a letter or digit and have at most 64 characters of A-Z a-z 0-9 _ . -";
            wrong.push((pointer.clone(), detail.to_owned()));
        }
        match serde_json::from_str(schema.get()) {
            Ok(value @ (Value::Object(_) | Value::Bool(_))) => {
                let violations = Schema::compile(&value).err().unwrap_or_default();
                let below = |one: Violation| (format!("{pointer}{}", one.pointer), one.message);
                wrong.extend(violations.into_iter().map(below));
            }
            Ok(_) => wrong.push((pointer, "must be a JSON object, true or false".to_owned())),
            Err(error) => wrong.push((pointer, format!("cannot parse the schema: {error}"))),
        }
    }
    wrong
}

/// All but Postrider's own.
async fn read_types(client: &Client) -> anyhow::Result<BTreeMap<String, TypeFile>> {
    let mut page = PageOf::limit(PAGE);
    let mut names = Vec::new();
    loop {
        let found = client.event_types(&page).await?;
        names.extend(found.data.into_iter().map(|one| one.r#type));
        match found.next_cursor {
            Some(cursor) => page.cursor = Some(cursor),
            None => break,
        }
    }
    names.retain(|name| !name.starts_with(RESERVED_PREFIX));
    let bar = progress(names.len() as u64, "reading types");
    let mut types = BTreeMap::new();
    for name in names {
        let one = client.event_type(&name).await?;
        let file = TypeFile {
            description: one.description,
            thin: one.thin,
            schemas: one.schemas.unwrap_or_default(),
        };
        types.insert(name, file);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(types)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> TypeFile {
        serde_json::from_str(text).expect("a file")
    }

    #[test]
    fn what_differs_is_told_and_what_is_the_same_is_not() {
        let there = file(r#"{"schemas": {"v1": {"type": "object", "maximum": 12345678901234567890123}}}"#);
        let same = file(r#"{"schemas":{"v1":{"maximum":12345678901234567890123.0,"type":"object"}}}"#);
        assert_eq!(differences(Some(&there), &same), Differences::default());
        assert_eq!(differences(None, &there).lines, ["+ new type", "+ version v1"]);
        let other = file(
            r#"{"description": "d", "thin": true, "schemas": {
                "v1": {"type": "object", "maximum": 12345678901234567890124}, "v2": {}}}"#,
        );
        let found = differences(Some(&there), &other);
        let signs: Vec<&str> = found.lines.iter().map(|line| &line[..1]).collect();
        assert_eq!(signs, ["~", "~", "!", "+"], "{found:?}");
        assert!(found.conflict);
    }

    #[test]
    fn what_the_server_would_refuse_is_known_before() {
        let pointers = |name: &str, text: &str| -> Vec<String> {
            let wrong = check(name, &file(text));
            wrong.into_iter().map(|(pointer, _)| pointer).collect()
        };
        assert!(pointers("a.b", r#"{"schemas":{"v1":{},"v2":true}}"#).is_empty());
        assert_eq!(pointers("A", r#"{"schemas":{}}"#), ["", "/schemas"]);
        assert_eq!(pointers("postrider.x", r#"{"schemas":{"v1":{}}}"#), [""]);
        assert_eq!(
            pointers(
                "a.b",
                r#"{"schemas":{"-":{},"v1":{"type":"strng"},"v2":3,"v3":{"maximum":1e400}}}"#
            ),
            ["/schemas/-", "/schemas/v1/type", "/schemas/v2", "/schemas/v3"]
        );
    }
}
