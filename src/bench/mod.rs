//! `postrider bench`: what the whole costs beside the bare HTTP client, in one run on one machine.
//!
//! It starts its own database, sink and Postrider processes, measures the ceiling first, then each scenario, and
//! prints ratios: absolute figures of a noisy machine mean little.

mod ceiling;
mod emits;
mod fleet;
mod life;
mod replays;
mod report;
mod scenarios;
mod sink;
mod usage;
mod world;

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use tokio::task::spawn_blocking;

use crate::embedded::{Cluster, Home};
use world::Ground;

/// Where the sink listens, and so what the guard is told to open.
const NETWORK: &str = "127.0.0.0/8";
/// About half a kilobyte, as a webhook's data often is.
const BODY_DATA: &str = r#"{"object":"invoice","id":"in_1PgcyT2eZvKYlo2C9hGfXkTn","customer":"cus_QXg1o8vcGmoR32","currency":"eur","amount_due":12900,"amount_paid":12900,"lines":[{"id":"il_1PgcyT","description":"Pro plan, July","quantity":3,"amount":9900},{"id":"il_1PgcyU","description":"Support, July","quantity":1,"amount":3000}],"period":{"start":"2026-07-01","end":"2026-07-31"},"paid_at":"2026-07-31T23:59:58Z","metadata":{"order":"6735","region":"eu-central"}}"#;

const PROFILING: &str = "shared_preload_libraries = 'pg_stat_statements'\npg_stat_statements.track = 'all'\n";

#[derive(Debug, Args)]
pub(crate) struct BenchFlags {
    /// Only these scenarios, by their letters: abcdefghklnrt
    #[arg(long)]
    only: Option<String>,
    /// Fewer deliveries: a look, not a measurement
    #[arg(long)]
    quick: bool,
    /// Also print where the database's time went in each bulk scenario
    #[arg(long)]
    profile: bool,
    /// Also write the figures as JSON to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

pub(crate) async fn run(flags: BenchFlags) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("no temporary directory")?;
    let path = folder.path().to_owned();
    eprintln!("starting a database …");
    let extra = if flags.profile { PROFILING } else { "" };
    let cluster =
        spawn_blocking(move || Home::below(&path).and_then(|home| Cluster::start(home, extra))).await??;
    let measured = measure(&flags, cluster.clone()).await;
    spawn_blocking(move || cluster.stop()).await??;
    let report = measured?;
    println!("{report}");
    if let Some(file) = &flags.json {
        std::fs::write(file, serde_json::to_string_pretty(&report)?)
            .context("the figures could not be written")?;
    }
    Ok(())
}

async fn measure(flags: &BenchFlags, cluster: Cluster) -> anyhow::Result<report::Report> {
    cluster.make_database().await?;
    let ground = Ground::prepare(cluster, flags.profile).await?;
    let size = if flags.quick {
        scenarios::QUICK
    } else {
        scenarios::FULL
    };
    scenarios::run(ground, size, flags.only.as_deref()).await
}

pub(crate) async fn sink() -> anyhow::Result<()> {
    sink::run().await
}

pub(crate) async fn ceiling(url: &str, concurrency: usize, seconds: u64) -> anyhow::Result<()> {
    ceiling::run(url, concurrency, seconds).await
}
