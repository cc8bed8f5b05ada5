//! The Prometheus exporter for the metrics of all crates.

use std::{sync::OnceLock, time::Duration};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use postrider_dispatcher::{health, telemetry::metrics};

use crate::process_metrics;

/// Seconds, from a fast read to an attempt that times out.
const SECONDS: [f64; 14] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
/// Seconds from an emit to its first attempt, which can be hours with a backlog.
const DELAY_SECONDS: [f64; 16] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0,
];
/// Seconds from an emit to the accepted response, which can be days with the default retry schedule.
const DELIVERY_SECONDS: [f64; 19] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21600.0,
    86400.0, 172_800.0,
];
/// Results per statement.
const ROWS: [f64; 8] = [1.0, 5.0, 10.0, 50.0, 100.0, 200.0, 300.0, 500.0];
/// Events per statement.
const EVENTS: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 250.0, 1000.0];

const TIDY_EVERY: Duration = Duration::from_secs(5);

static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();

/// Call before anything is counted: earlier counts are lost.
pub(crate) fn start(role: &'static str) -> anyhow::Result<()> {
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .set_buckets_for_metric(
            Matcher::Full("postrider_first_attempt_delay_seconds".to_owned()),
            &DELAY_SECONDS,
        )?
        .set_buckets_for_metric(
            Matcher::Full("postrider_delivery_seconds".to_owned()),
            &DELIVERY_SECONDS,
        )?
        .set_buckets_for_metric(Matcher::Suffix("_rows".to_owned()), &ROWS)?
        .set_buckets_for_metric(Matcher::Suffix("_events".to_owned()), &EVENTS)?;
    process_metrics::start();
    let handle = builder.install_recorder()?;
    let _ = HANDLE.set(handle);
    let (help, version) = (
        "Always 1; the labels are the running version and role",
        env!("CARGO_PKG_VERSION"),
    );
    let labels = [("version", version), ("role", role)];
    metrics::labelled_gauge("postrider_build_info", help, &labels).set(1.0);
    health::begin(role);
    Ok(())
}

pub(crate) fn render() -> String {
    metrics::sample_pools();
    health::sample();
    let text = HANDLE.get().map(PrometheusHandle::render).unwrap_or_default();
    let mut text = metrics::without_stale(&text);
    text.push_str(&metrics::top_endpoints_text());
    text.push_str(&process_metrics::text());
    text
}

/// Drains histograms into their buckets; without this they grow while nobody scrapes them.
pub(crate) async fn keep_tidy() {
    loop {
        tokio::time::sleep(TIDY_EVERY).await;
        if let Some(handle) = HANDLE.get() {
            handle.run_upkeep();
        }
    }
}
