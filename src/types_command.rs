//! `types export` and `types import`: a team's event types as files in its own repository, one for each type.
//! Invariant: import shows what it would change before it changes anything, and a second one changes nothing.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use clap::Subcommand;
use reqwest::{Client, Method};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::settings::Environment;

const DEFAULT_URL: &str = "http://127.0.0.1:8080";
const FILES_MAX: usize = 10_000;
const FILE_BYTES_MAX: u64 = 1024 * 1024;

#[derive(Subcommand)]
pub(crate) enum TypesCommand {
    /// Writes each event type to DIRECTORY as <type>.json
    Export { directory: PathBuf },
    /// Shows how the files of DIRECTORY differ from what is there, and with --apply puts them there
    Import {
        directory: PathBuf,
        /// Make the changes that were shown
        #[arg(long)]
        apply: bool,
    },
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

pub(crate) async fn run(command: TypesCommand, environment: &Environment) -> anyhow::Result<()> {
    let api = Api::of(environment)?;
    match command {
        TypesCommand::Export { directory } => export(&api, &directory).await,
        TypesCommand::Import { directory, apply } => import(&api, &directory, apply).await,
    }
}

async fn export(api: &Api, directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("{} can't be made", directory.display()))?;
    let types = api.types().await?;
    for (name, file) in &types {
        let path = directory.join(format!("{name}.json"));
        let text = format!("{}\n", serde_json::to_string_pretty(file)?);
        fs::write(&path, text).with_context(|| format!("{} can't be written", path.display()))?;
    }
    println!("{} types written to {}", types.len(), directory.display());
    Ok(())
}

async fn import(api: &Api, directory: &Path, apply: bool) -> anyhow::Result<()> {
    let files = read_files(directory)?;
    let there = api.types().await?;
    let mut changed = Vec::new();
    for (name, file) in &files {
        let lines = differences(there.get(name), file);
        if lines.is_empty() {
            continue;
        }
        println!("{name}");
        for line in &lines {
            println!("  {line}");
        }
        changed.push((name, file));
    }
    for name in there.keys().filter(|name| !files.contains_key(*name)) {
        println!("{name}\n  is there and has no file: left alone");
    }
    if changed.is_empty() {
        println!("Nothing to change.");
        return Ok(());
    }
    if !apply {
        println!("Nothing was changed. Run it again with --apply to make these changes.");
        return Ok(());
    }
    for (name, file) in &changed {
        let answer = api.put(name, file).await?;
        for report in answer["compatibility"].as_array().into_iter().flatten() {
            for one in report["breaks"].as_array().into_iter().flatten() {
                println!(
                    "{name} {} breaks readers of {}: {} {}",
                    report["version"].as_str().unwrap_or_default(),
                    report["before"].as_str().unwrap_or_default(),
                    one["pointer"].as_str().unwrap_or_default(),
                    one["detail"].as_str().unwrap_or_default()
                );
            }
        }
    }
    println!("{} types changed.", changed.len());
    Ok(())
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

struct Api {
    client: Client,
    base: String,
    key: String,
}

impl Api {
    fn of(environment: &Environment) -> anyhow::Result<Self> {
        let key = environment
            .secret("POSTRIDER_API_KEY")?
            .context("POSTRIDER_API_KEY or POSTRIDER_API_KEY_FILE is not set: it has an admin key")?;
        let url = environment.get("POSTRIDER_URL").unwrap_or(DEFAULT_URL);
        Ok(Self {
            client: Client::builder()
                .timeout(std::time::Duration::from_secs(30))
                .build()?,
            base: format!("{}/v1", url.trim_end_matches('/')),
            key,
        })
    }

    async fn call(&self, method: Method, path: &str, body: Option<String>) -> anyhow::Result<Value> {
        let mut request = self
            .client
            .request(method.clone(), format!("{}{path}", self.base))
            .bearer_auth(&self.key);
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let answer = request
            .send()
            .await
            .with_context(|| format!("{} did not answer", self.base))?;
        let status = answer.status();
        let value: Value = answer.json().await.unwrap_or_default();
        if !status.is_success() {
            let told = value["detail"].as_str().unwrap_or("no reason was given");
            bail!("{method} {path} was refused with {status}: {told}");
        }
        Ok(value)
    }

    /// All but those that are Postrider's own.
    async fn types(&self) -> anyhow::Result<BTreeMap<String, TypeFile>> {
        let mut types = BTreeMap::new();
        let mut cursor = String::new();
        loop {
            let page = self
                .call(Method::GET, &format!("/event-types?limit=1000{cursor}"), None)
                .await?;
            for one in page["data"].as_array().into_iter().flatten() {
                let name = one["type"].as_str().unwrap_or_default().to_owned();
                if name.starts_with("postrider.") {
                    continue;
                }
                let mut whole = self
                    .call(Method::GET, &format!("/event-types/{name}"), None)
                    .await?;
                let file = TypeFile {
                    description: whole["description"].as_str().map(str::to_owned),
                    thin: whole["thin"].as_bool().unwrap_or(false),
                    schemas: serde_json::from_value(whole["schemas"].take())?,
                };
                types.insert(name, file);
            }
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return Ok(types),
            }
        }
    }

    async fn put(&self, name: &str, file: &TypeFile) -> anyhow::Result<Value> {
        let body = serde_json::json!({
            "description": file.description, "thin": file.thin, "schemas": file.schemas,
        });
        self.call(
            Method::PUT,
            &format!("/event-types/{name}"),
            Some(body.to_string()),
        )
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
