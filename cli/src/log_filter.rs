//! `log-filter`: the log filter of all processes.

use std::process::ExitCode;

use clap::Args;
use postrider_client::LogFilter;

use crate::{
    output::show,
    reach::{Failure, Reach},
    settings::Environment,
};

#[derive(Args)]
pub struct LogFilterArguments {
    /// Filter to set, like info,postrider_dispatcher=debug; without it, the current one is shown
    #[arg(conflicts_with = "reset")]
    filter: Option<String>,
    /// Let every process use POSTRIDER_LOG again
    #[arg(long)]
    reset: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(crate) async fn run(
    arguments: LogFilterArguments,
    environment: &Environment,
) -> Result<ExitCode, Failure> {
    let done = async {
        let client = arguments.reach.client(environment)?;
        let changes = arguments.reset || arguments.filter.is_some();
        let current = match changes {
            true => {
                let filter = arguments.filter.clone();
                client.put_log_filter(&LogFilter { filter }).await?
            }
            false => client.log_filter().await?,
        };
        show(arguments.reach.json, &current, || match &current.filter {
            Some(filter) => println!("{filter}"),
            None => println!("not set: every process uses POSTRIDER_LOG"),
        });
        Ok(ExitCode::SUCCESS)
    };
    done.await.map_err(|error| arguments.reach.failure(error))
}
