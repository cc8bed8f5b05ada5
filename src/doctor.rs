//! `postrider doctor`: checks the installation and says what to do. `--bundle` writes what a supporter needs to a file.
//! Invariant: nothing is changed, and neither the output nor the file contains a secret.

use std::{
    fs::OpenOptions,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use clap::Args;
use postrider_dispatcher::diagnosis::{Finding, Patient, Verdict, counted, facts};
use serde_json::{Value, json};
use sqlx::Connection;

use crate::{
    machine,
    settings::{Environment, Flags, Settings, shown_values},
};

/// The exit status if the worst finding is a warning.
const EXIT_WARNING: u8 = 3;

#[derive(Args)]
pub(crate) struct DoctorArguments {
    #[command(flatten)]
    pub(crate) flags: Flags,
    /// Output JSON
    #[arg(long)]
    json: bool,
    /// Also write a support bundle, without secrets, URLs and names of tenants, to this new file
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
}

pub(crate) async fn run(arguments: &DoctorArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let database = settings.require_database()?;
    let patient = Patient {
        database: database.direct.clone(),
        replica: database.replica.clone(),
        home: settings.values.home_database_url.clone(),
        vault: settings.values.master_key.clone(),
        guard: settings.guard(&[]),
    };
    let mut findings = patient.examine().await;
    findings.push(machine::examine_files(settings.dispatcher.max_in_flight));
    let worst = findings.iter().map(|finding| finding.verdict).max();
    let worst = worst.unwrap_or(Verdict::Ok);
    if let Some(path) = &arguments.bundle {
        write_bundle(path, arguments, &findings, &patient).await?;
    }
    match arguments.json {
        true => println!("{}", json!({ "worst": worst, "checks": findings })),
        false => print(&findings, arguments.bundle.as_deref()),
    }
    Ok(match worst {
        Verdict::Ok => ExitCode::SUCCESS,
        Verdict::Warning => ExitCode::from(EXIT_WARNING),
        Verdict::Error => ExitCode::FAILURE,
    })
}

/// The worst last, where it is seen.
fn print(findings: &[Finding], bundle: Option<&Path>) {
    let mut findings: Vec<&Finding> = findings.iter().collect();
    findings.sort_by_key(|finding| finding.verdict);
    for finding in &findings {
        println!(
            "{:<8}{:<24}{}",
            finding.verdict.as_str(),
            finding.check,
            finding.found
        );
        if let Some(advice) = &finding.advice {
            println!("{:<32}→ {advice}", "");
        }
    }
    let count = |verdict| findings.iter().filter(|one| one.verdict == verdict).count() as u32;
    println!(
        "\n{} ok, {}, {}",
        count(Verdict::Ok),
        counted(count(Verdict::Warning), "warning", "warnings"),
        counted(count(Verdict::Error), "error", "errors")
    );
    if let Some(path) = bundle {
        println!(
            "The support bundle is {}. Read it before you share it.",
            path.display()
        );
    }
}

async fn write_bundle(
    path: &Path,
    arguments: &DoctorArguments,
    findings: &[Finding],
    patient: &Patient,
) -> anyhow::Result<()> {
    let database: Value = match patient.database.connect().await {
        Ok(mut connection) => {
            let facts = facts(&mut connection).await;
            connection.close().await?;
            json!(facts)
        }
        Err(error) => json!({ "error": error.to_string() }),
    };
    let findings: Vec<Finding> = findings.iter().map(Finding::for_bundle).collect();
    let bundle = json!({
        "postrider": env!("CARGO_PKG_VERSION"),
        "checks": findings,
        "settings": shown_values(&arguments.flags, &Environment::of_process()),
        "database": database,
    });
    let text = serde_json::to_string_pretty(&bundle)?;
    // An existing file is not overwritten.
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot create the support bundle {}", path.display()))?;
    file.write_all(text.as_bytes())
        .with_context(|| format!("cannot write the support bundle {}", path.display()))
}
