//! The results, as a table for people and as JSON for programs.

use std::fmt;

use serde::Serialize;

#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    pub(super) rows: Vec<Row>,
    pub(super) figures: Vec<Figure>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sizing: Option<Sizing>,
}

/// What one event of 1 KB costs, delivered to one endpoint by its first attempt.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Sizing {
    pub(super) event_bytes: f64,
    pub(super) attempt_bytes: f64,
    /// More, if the producer gives the event an id of its own.
    pub(super) own_id_bytes: f64,
    pub(super) wal_bytes: f64,
    /// More for each further endpoint of the event.
    pub(super) further_wal_bytes: f64,
    pub(super) postrider_cpu_ms: f64,
    pub(super) postgres_cpu_ms: f64,
}

impl Sizing {
    const EVENTS_PER_DAY: [f64; 4] = [1e5, 1e6, 1e7, 1e8];
    const SECONDS_PER_DAY: f64 = 86_400.0;
    const BYTES_PER_GB: f64 = 1e9;

    /// The rows of the table in docs/operations.md.
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nsizing: {:.0} bytes an event, {:.0} an attempt, {:.0} an own id; {:.0} bytes of WAL, {:.0} for each further \
             endpoint; {:.2} ms of CPU (Postrider), {:.2} ms (Postgres)",
            self.event_bytes,
            self.attempt_bytes,
            self.own_id_bytes,
            self.wal_bytes,
            self.further_wal_bytes,
            self.postrider_cpu_ms,
            self.postgres_cpu_ms
        )?;
        for events in Self::EVENTS_PER_DAY {
            let disk = events * (self.event_bytes + self.attempt_bytes) / Self::BYTES_PER_GB;
            let cores = |ms: f64| events * ms / 1000.0 / Self::SECONDS_PER_DAY;
            writeln!(
                f,
                "| {events:>11} | {:>8.1} GB | {:>8.1} GB | {:>8.1} GB | {:>8.1} GB | {:>6.2} | {:>6.2} |",
                disk * 7.0,
                disk * 30.0,
                disk * 90.0,
                events * self.wal_bytes / Self::BYTES_PER_GB,
                cores(self.postrider_cpu_ms),
                cores(self.postgres_cpu_ms),
            )?;
        }
        Ok(())
    }
}

/// One bulk scenario.
#[derive(Debug, Default, Serialize)]
pub(super) struct Row {
    pub(super) scenario: String,
    pub(super) deliveries: u64,
    pub(super) per_second: f64,
    pub(super) of_ceiling: Option<f64>,
    pub(super) p50_ms: Option<f64>,
    pub(super) p95_ms: Option<f64>,
    pub(super) p99_ms: Option<f64>,
    /// CPU seconds per 1,000 deliveries.
    pub(super) sender_cpu: f64,
    pub(super) postgres_cpu: Option<f64>,
    pub(super) sink_cpu: f64,
    pub(super) peak_memory_mb: f64,
}

/// One result and the bound it is checked against.
#[derive(Debug, Serialize)]
pub(super) struct Figure {
    pub(super) name: String,
    pub(super) value: f64,
    pub(super) bound: Option<Bound>,
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Report {
    pub(super) fn note(&mut self, name: &str, value: f64) {
        self.figure(name, value, None);
    }

    pub(super) fn at_least(&mut self, name: &str, value: f64, least: f64) {
        self.figure(name, value, Some(Bound::AtLeast(least)));
    }

    pub(super) fn at_most(&mut self, name: &str, value: f64, most: f64) {
        self.figure(name, value, Some(Bound::AtMost(most)));
    }

    fn figure(&mut self, name: &str, value: f64, bound: Option<Bound>) {
        eprintln!("  {name}: {value:.2}");
        self.figures.push(Figure {
            name: name.to_owned(),
            value,
            bound,
        });
    }
}

impl Figure {
    fn verdict(&self) -> String {
        let (sign, bound, is_met) = match self.bound {
            None => return String::new(),
            Some(Bound::AtLeast(least)) => ("≥", least, self.value >= least),
            Some(Bound::AtMost(most)) => ("≤", most, self.value <= most),
        };
        format!("{sign} {bound:<6} {}", if is_met { "yes" } else { "NO" })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.rows.is_empty() {
            writeln!(
                f,
                "{:<44} {:>9} {:>9} {:>8} {:>9} {:>9} {:>9}   {:>22} {:>8}",
                "scenario",
                "number",
                "per s",
                "of (a)",
                "p50 ms",
                "p95 ms",
                "p99 ms",
                "CPU s/1000 (us,pg,sink)",
                "peak MB"
            )?;
        }
        let some =
            |value: Option<f64>, digits: usize| value.map_or("–".to_owned(), |v| format!("{v:.digits$}"));
        for row in &self.rows {
            writeln!(
                f,
                "{:<44} {:>9} {:>9.0} {:>8} {:>9} {:>9} {:>9}   {:>6.3} {:>7} {:>7.3} {:>9.0}",
                row.scenario,
                row.deliveries,
                row.per_second,
                some(row.of_ceiling, 2),
                some(row.p50_ms, 1),
                some(row.p95_ms, 1),
                some(row.p99_ms, 1),
                row.sender_cpu,
                some(row.postgres_cpu, 3),
                row.sink_cpu,
                row.peak_memory_mb,
            )?;
        }
        writeln!(f)?;
        for figure in &self.figures {
            writeln!(
                f,
                "{:<72} {:>10.2}   {}",
                figure.name,
                figure.value,
                figure.verdict()
            )?;
        }
        self.sizing.as_ref().map_or(Ok(()), |sizing| sizing.write(f))
    }
}
