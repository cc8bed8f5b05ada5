//! Where the figures that the other crates count come together, for Prometheus to read.

use std::{sync::OnceLock, time::Duration};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// Seconds, from a fast read to an attempt at its time limit.
const SECONDS: [f64; 14] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
/// Results in one statement.
const ROWS: [f64; 8] = [1.0, 5.0, 10.0, 50.0, 100.0, 200.0, 300.0, 500.0];

const TIDY_EVERY: Duration = Duration::from_secs(5);

static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();

/// Before anything is counted. What was counted before is lost.
pub(crate) fn start() -> anyhow::Result<()> {
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_rows".to_owned()), &ROWS)?;
    let handle = builder.install_recorder()?;
    let _ = HANDLE.set(handle);
    postrider_dispatcher::describe_metrics();
    Ok(())
}

pub(crate) fn render() -> String {
    HANDLE.get().map(PrometheusHandle::render).unwrap_or_default()
}

/// Histograms are emptied into their buckets now and then; without this they grow while nobody reads them.
pub(crate) async fn keep_tidy() {
    loop {
        tokio::time::sleep(TIDY_EVERY).await;
        if let Some(handle) = HANDLE.get() {
            handle.run_upkeep();
        }
    }
}
