//! `completions`: for shells.

use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;
use serde_json::json;

use super::{output::json_line, reach::Failure};
use crate::command_line;

#[derive(Args)]
pub(crate) struct CompletionsArguments {
    shell: Shell,
    /// Write JSON, for programs: the script as a text
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &CompletionsArguments) -> Result<ExitCode, Failure> {
    let mut command = command_line::command();
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "postrider", &mut script);
    let script = String::from_utf8_lossy(&script);
    match arguments.json {
        true => json_line(&json!({"shell": arguments.shell.to_string(), "script": script})),
        false => print!("{script}"),
    }
    Ok(ExitCode::SUCCESS)
}
