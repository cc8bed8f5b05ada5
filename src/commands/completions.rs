//! `completions`: for shells.

use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;

use super::reach::Failure;
use crate::command_line;

#[derive(Args)]
pub(crate) struct CompletionsArguments {
    shell: Shell,
}

pub(crate) fn run(arguments: &CompletionsArguments) -> Result<ExitCode, Failure> {
    let mut command = command_line::command();
    clap_complete::generate(arguments.shell, &mut command, "postrider", &mut std::io::stdout());
    Ok(ExitCode::SUCCESS)
}
