//! `types export` and `types import`: a team's event types as files in its own repository, one for each type.
//! Invariant: import shows what it would change before it changes anything, and a second one changes nothing.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, ensure};
use clap::{Args, Subcommand};
use postrider_client::{Client, EventType, EventTypeSettings, PageOf};
use postrider_proto::routing::RESERVED_PREFIX;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    output::{json_line, progress},
    reach::{Failure, Reach},
};
use crate::settings::Environment;

const PAGE: u32 = 1_000;
const FILES_MAX: usize = 10_000;
const FILE_BYTES_MAX: u64 = 1024 * 1024;

#[derive(Subcommand)]
pub(crate) enum TypesCommand {
    /// Writes each event type to DIRECTORY as <type>.json
    Export(ExportArguments),
    /// Shows how the files of DIRECTORY differ from what is there, and with --apply puts them there
    Import(ImportArguments),
}

#[derive(Args)]
pub(crate) struct ExportArguments {
    directory: PathBuf,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub(crate) struct ImportArguments {
    directory: PathBuf,
    /// Make the changes that were shown
    #[arg(long)]
    apply: bool,
    #[command(flatten)]
    reach: Reach,
}

/// A type as its file has it. The name is the file's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TypeFile {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    thin: bool,
    schemas: BTreeMap<String, Value>,
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
    match done.await {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => Err(reach.failure(error)),
    }
}

async fn export(client: &Client, arguments: &ExportArguments) -> anyhow::Result<()> {
    let directory = &arguments.directory;
    fs::create_dir_all(directory).with_context(|| format!("{} can't be made", directory.display()))?;
    let types = read_types(client).await?;
    for (name, file) in &types {
        let path = directory.join(format!("{name}.json"));
        let text = format!("{}\n", serde_json::to_string_pretty(file)?);
        fs::write(&path, text).with_context(|| format!("{} can't be written", path.display()))?;
    }
    if arguments.reach.json {
        json_line(&json!({"written": types.keys().collect::<Vec<_>>()}));
    } else {
        println!("{} types written to {}", types.len(), directory.display());
    }
    Ok(())
}

async fn import(client: &Client, arguments: &ImportArguments) -> anyhow::Result<()> {
    let files = read_files(&arguments.directory)?;
    let there = read_types(client).await?;
    let changed: BTreeMap<&String, Vec<String>> = files
        .iter()
        .map(|(name, file)| (name, differences(there.get(name), file)))
        .filter(|(_, lines)| !lines.is_empty())
        .collect();
    let without_file: Vec<&String> = there.keys().filter(|name| !files.contains_key(*name)).collect();
    if !arguments.reach.json {
        show(&changed, &without_file);
    }
    let mut reports = Vec::new();
    if arguments.apply {
        let bar = progress(changed.len() as u64, "changing types");
        for name in changed.keys() {
            let Some(file) = files.get(*name) else { continue };
            let settings = EventTypeSettings {
                description: file.description.clone(),
                thin: file.thin,
                schemas: file.schemas.clone(),
            };
            reports.push(client.put_event_type(name, &settings).await?);
            bar.inc(1);
        }
        bar.finish_and_clear();
    }
    if arguments.reach.json {
        json_line(&json!({
            "changes": changed, "applied": arguments.apply, "without_file": without_file, "types": reports,
        }));
        return Ok(());
    }
    for report in &reports {
        show_breaks(report);
    }
    match (changed.len(), arguments.apply) {
        (0, _) => println!("Nothing to change."),
        (_, false) => println!("Nothing was changed. Run it again with --apply to make these changes."),
        (count, true) => println!("{count} types changed."),
    }
    Ok(())
}

fn show(changed: &BTreeMap<&String, Vec<String>>, without_file: &[&String]) {
    for (name, lines) in changed {
        println!("{name}");
        for line in lines {
            println!("  {line}");
        }
    }
    for name in without_file {
        println!("{name}\n  is there and has no file: left alone");
    }
}

fn show_breaks(changed: &EventType) {
    for report in &changed.compatibility {
        for one in &report.breaks {
            println!(
                "{} {} breaks readers of {}: {} {}",
                changed.name, report.version, report.before, one.pointer, one.detail
            );
        }
    }
}

fn differences(there: Option<&TypeFile>, file: &TypeFile) -> Vec<String> {
    let Some(there) = there else {
        let mut lines = vec!["+ new type".to_owned()];
        lines.extend(file.schemas.keys().map(|version| format!("+ version {version}")));
        return lines;
    };
    let mut lines = Vec::new();
    if there.description != file.description {
        lines.push(format!(
            "~ description: {:?} becomes {:?}",
            there.description.as_deref().unwrap_or_default(),
            file.description.as_deref().unwrap_or_default()
        ));
    }
    if there.thin != file.thin {
        lines.push(format!("~ thin: {} becomes {}", there.thin, file.thin));
    }
    for (version, schema) in &file.schemas {
        match there.schemas.get(version) {
            None => lines.push(format!("+ version {version}")),
            Some(published) if published != schema => {
                lines.push(format!(
                    "! version {version} differs from what is published, which can't change"
                ));
            }
            Some(_) => {}
        }
    }
    lines
}

fn read_files(directory: &Path) -> anyhow::Result<BTreeMap<String, TypeFile>> {
    let mut files = BTreeMap::new();
    let entries =
        fs::read_dir(directory).with_context(|| format!("{} can't be read", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        let Some(name) = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_suffix(".json"))
            .map(str::to_owned)
        else {
            continue;
        };
        ensure!(
            files.len() < FILES_MAX,
            "{} has more than {FILES_MAX} files",
            directory.display()
        );
        ensure!(
            fs::metadata(&path)?.len() <= FILE_BYTES_MAX,
            "{} is larger than {FILE_BYTES_MAX} bytes",
            path.display()
        );
        let text = fs::read_to_string(&path).with_context(|| format!("{} can't be read", path.display()))?;
        let file =
            serde_json::from_str(&text).with_context(|| format!("{} is no event type", path.display()))?;
        files.insert(name, file);
    }
    Ok(files)
}

/// All but those that are Postrider's own.
async fn read_types(client: &Client) -> anyhow::Result<BTreeMap<String, TypeFile>> {
    let mut page = PageOf::limit(PAGE);
    let mut names = Vec::new();
    loop {
        let found = client.event_types(&page).await?;
        names.extend(found.data.into_iter().map(|one| one.name));
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

    fn file(value: Value) -> TypeFile {
        serde_json::from_value(value).expect("a file")
    }

    #[test]
    fn what_differs_is_told_and_what_is_the_same_is_not() {
        let there = file(json!({"schemas": {"v1": {"type": "object"}}}));
        assert!(differences(Some(&there), &there.clone()).is_empty());
        assert_eq!(differences(None, &there), ["+ new type", "+ version v1"]);
        let other = file(json!({"description": "d", "thin": true, "schemas": {"v1": {}, "v2": {}}}));
        let lines = differences(Some(&there), &other);
        let signs: Vec<&str> = lines.iter().map(|line| &line[..1]).collect();
        assert_eq!(signs, ["~", "~", "!", "+"], "{lines:?}");
    }
}
