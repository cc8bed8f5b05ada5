//! The endpoints with the most failed attempts, as an opt-in metric.
//!
//! Invariant: at most as many series as the operator has set, and an endpoint that leaves the top has none. The exporter
//! keeps every series that it has seen, so these are written as text beside it.

use std::{fmt::Write, sync::Mutex, time::Duration};

use sqlx::{FromRow, PgExecutor};
use tokio_util::sync::CancellationToken;

use crate::{bind::BindAll, db_timeout::WithDbTimeout, lock::lock};

const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How far back failures count.
const MINUTES: i32 = 5;
/// Pairs of endpoint and minute that one read looks at, newest first.
const ROWS_MAX: i64 = 20_000;
const NAME: &str = "postrider_top_failing_attempts";
const HELP: &str = "Failed attempts in the last five minutes, of the endpoints with the most";

static TEXT: Mutex<String> = Mutex::new(String::new());

#[derive(FromRow)]
struct Row {
    tenant: String,
    endpoint: String,
    failed: i64,
}

/// Runs until stopped. `count` is the number of series.
pub async fn watch<P>(pool: P, count: usize, stop: CancellationToken)
where
    for<'p> &'p P: PgExecutor<'p>,
{
    loop {
        let rows = read(&pool, count).with_db_timeout().await;
        // Old values would be wrong: without a database there are none.
        let text = rows.as_deref().map(in_words).unwrap_or_default();
        *lock(&TEXT) = text;
        if let Err(error) = rows {
            tracing::debug!(%error, "reading the top failing endpoints failed; retrying");
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// In the Prometheus text format; empty if it is turned off or nothing fails.
pub fn text() -> String {
    lock(&TEXT).clone()
}

async fn read(db: impl PgExecutor<'_>, count: usize) -> Result<Vec<Row>, sqlx::Error> {
    sqlx::query_as(include_str!("../sql/top_endpoints.sql"))
        .bind_all((MINUTES, ROWS_MAX, count as i64))
        .fetch_all(db)
        .await
}

fn in_words(rows: &[Row]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut text = format!("# HELP {NAME} {HELP}\n# TYPE {NAME} gauge\n");
    for row in rows {
        let (tenant, endpoint) = (escaped(&row.tenant), escaped(&row.endpoint));
        let _ = writeln!(
            text,
            "{NAME}{{tenant=\"{tenant}\",endpoint=\"{endpoint}\"}} {}",
            row.failed
        );
    }
    text
}

/// Neither id can contain any of these today.
fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_written_for_nobody_and_a_label_cannot_break_out() {
        assert_eq!(in_words(&[]), "");
        let row = Row {
            tenant: "a\"} 1\n".to_owned(),
            endpoint: "ep_1".to_owned(),
            failed: 7,
        };
        let text = in_words(&[row]);
        let last = text.lines().last().expect("a line");
        assert_eq!(last, format!(r#"{NAME}{{tenant="a\"}} 1\n",endpoint="ep_1"}} 7"#));
    }
}
