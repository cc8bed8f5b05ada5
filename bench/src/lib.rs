//! The benchmark: what a whole installation costs compared with the bare HTTP client, in one run on one machine.
//!
//! It starts its own database, sink and Postrider processes, measures the ceiling first, then each scenario, and
//! prints ratios: absolute numbers of a noisy machine mean little.

#![allow(clippy::disallowed_methods)]

pub mod seed;

mod ceiling;
mod data;
mod emits;
mod fleet;
mod life;
mod light;
mod replays;
mod report;
mod scenarios;
mod sink;
mod sizing;
mod usage;
mod world;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use postrider_dispatcher::{Settings, partitions, schema, tls};
use postrider_embedded::{Cluster, Home};
use sqlx::PgPool;
use tokio::task::spawn_blocking;
use world::Ground;

/// Where the sink listens, and so what the guard has to allow.
const NETWORK: &str = "127.0.0.0/8";
/// About half a kilobyte, a common size of webhook data.
const BODY_DATA: &str = r#"{"object":"invoice","id":"in_1PgcyT2eZvKYlo2C9hGfXkTn","customer":"cus_QXg1o8vcGmoR32","currency":"eur","amount_due":12900,"amount_paid":12900,"lines":[{"id":"il_1PgcyT","description":"Pro plan, July","quantity":3,"amount":9900},{"id":"il_1PgcyU","description":"Support, July","quantity":1,"amount":3000}],"period":{"start":"2026-07-01","end":"2026-07-31"},"paid_at":"2026-07-31T23:59:58Z","metadata":{"order":"6735","region":"eu-central"}}"#;

const PROFILING: &str = "shared_preload_libraries = 'pg_stat_statements'\npg_stat_statements.track = 'all'\n";

/// Measure deliveries compared with the bare HTTP client, on a temporary database.
#[derive(Parser)]
#[command(name = "postrider-bench", version, args_conflicts_with_subcommands = true)]
pub struct CommandLine {
    #[command(flatten)]
    flags: BenchFlags,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Args)]
struct BenchFlags {
    /// Only these scenarios, by letter: abcdefghiklmnorst
    #[arg(long)]
    only: Option<String>,
    /// Fewer deliveries: a first impression, not a measurement
    #[arg(long)]
    quick: bool,
    /// Also print where the database spent its time in each bulk scenario
    #[arg(long)]
    profile: bool,
    /// Also write the results as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The program to measure [default: postrider in the directory of this program]
    #[arg(long, value_name = "PROGRAM")]
    postrider: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    /// Fill a database with a generated history, to test the pages at scale
    Seed {
        #[arg(long, default_value_t = 1_000_000)]
        attempts: i64,
        #[arg(long, env = "POSTRIDER_DATABASE_URL", hide_env_values = true)]
        database_url: String,
    },
    #[command(hide = true)]
    Sink,
    #[command(hide = true)]
    Ceiling {
        url: String,
        concurrency: usize,
        seconds: u64,
    },
}

impl CommandLine {
    pub async fn run(self) -> anyhow::Result<()> {
        tls::install_provider();
        match self.command {
            None => run_benchmark(self.flags).await,
            Some(Command::Seed {
                attempts,
                database_url,
            }) => {
                let pool = PgPool::connect(&database_url)
                    .await
                    .context("cannot connect to the database")?;
                bring_up_to_date(&pool).await?;
                seed::run(&pool, attempts).await
            }
            Some(Command::Sink) => sink::run().await,
            Some(Command::Ceiling {
                url,
                concurrency,
                seconds,
            }) => ceiling::run(&url, concurrency, seconds).await,
        }
    }
}

async fn run_benchmark(flags: BenchFlags) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("cannot create a temporary directory")?;
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
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

async fn measure(flags: &BenchFlags, cluster: Cluster) -> anyhow::Result<report::Report> {
    let program = match &flags.postrider {
        Some(program) => program.clone(),
        None => std::env::current_exe()?.with_file_name("postrider"),
    };
    cluster.make_database().await?;
    let ground = Ground::prepare(cluster, program, flags.profile).await?;
    let size = if flags.quick {
        scenarios::QUICK
    } else {
        scenarios::FULL
    };
    scenarios::run(ground, size, flags.only.as_deref()).await
}

async fn bring_up_to_date(pool: &PgPool) -> anyhow::Result<()> {
    schema::migrate(pool).await?;
    partitions::make_ahead(pool, Settings::default().retention)
        .await
        .context("cannot create the partitions of the coming days")
}
