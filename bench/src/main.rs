//! The `postrider-bench` program, which `make bench` runs.

use clap::Parser;
use postrider_bench::CommandLine;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    CommandLine::parse().run().await
}
