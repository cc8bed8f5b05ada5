//! `completions`: scripts for shells.

use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;
use serde_json::json;

use crate::{output::json_line, reach::Failure};

#[derive(Args)]
pub struct CompletionsArguments {
    shell: Shell,
    /// Output JSON, with the script as a string
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &CompletionsArguments, mut command: Command) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "postrider", &mut script);
    let script = String::from_utf8_lossy(&script);
    match arguments.json {
        true => json_line(&json!({"shell": arguments.shell.to_string(), "script": script})),
        false => print!("{script}"),
    }
    Ok(ExitCode::SUCCESS)
}
