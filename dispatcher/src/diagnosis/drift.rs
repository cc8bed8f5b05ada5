//! Whether the schema is what the migrations make: a dropped index or a changed function is found before it hurts.

use std::collections::BTreeSet;

use sqlx::PgConnection;

use super::Finding;
use crate::store::schema::{self, SchemaError};

/// What the migrations make. `tests/it/doctor.rs` compares it with a new database, and writes it again.
const EXPECTED: &str = include_str!("../../../migrations/inventory.txt");
/// Differences that are listed.
const LISTED_MAX: usize = 10;

pub(super) async fn version(db: &mut PgConnection) -> Finding {
    const CHECK: &str = "schema.version";
    let run = "Run `postrider migrate`.";
    match schema::pending(db).await {
        Err(error @ (SchemaError::TooNew { .. } | SchemaError::PreRelease)) => Finding::error(
            CHECK,
            error.to_string(),
            "Use another release or another database.",
        ),
        Err(error) => Finding::unknown(CHECK, error),
        Ok(report) => match report.newer {
            Some(found) => Finding::warning(
                CHECK,
                format!("the schema is at version {found}, newer than this program and compatible with it"),
                "Fine during an upgrade or a rollback. Otherwise use the release that migrated it.",
            ),
            None if report.is_empty() => Finding::ok(CHECK, "up to date"),
            None if report.migrations.is_empty() => {
                Finding::warning(CHECK, format!("out of date: {report}"), run)
            }
            None => Finding::error(CHECK, format!("out of date: {report}"), run),
        },
    }
}

/// Every object of our schema, as a line of text.
pub async fn inventory(db: &mut PgConnection) -> Result<Vec<String>, sqlx::Error> {
    let mut transaction = schema::with_full_names(db).await?;
    let lines = sqlx::query_scalar(include_str!("sql/inventory.sql"))
        .fetch_all(&mut *transaction)
        .await?;
    transaction.rollback().await?;
    Ok(lines)
}

pub(super) async fn objects(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "schema.drift";
    // Another release has other objects.
    if schema::pending(&mut *db)
        .await
        .is_ok_and(|report| report.newer.is_some())
    {
        return Ok(Finding::ok(CHECK, "not compared, because the schema is newer"));
    }
    let found: BTreeSet<String> = inventory(db).await?.into_iter().collect();
    let expected: BTreeSet<String> = EXPECTED.lines().map(str::to_owned).collect();
    let missing: Vec<&String> = expected.difference(&found).collect();
    let foreign: Vec<&String> = found.difference(&expected).collect();
    Ok(match (missing.is_empty(), foreign.is_empty()) {
        (true, true) => Finding::ok(CHECK, "the schema is what the migrations make"),
        (true, false) => Finding::warning(
            CHECK,
            format!("not made by the migrations: {}", listed(&foreign)),
            "Remove it, or move it to a schema of your own: a later migration may conflict with it.",
        )
        .in_bundles(format!("not made by the migrations: {} objects", foreign.len())),
        (false, _) => Finding::error(
            CHECK,
            format!("missing or changed: {}", listed(&missing)),
            "Run `postrider migrate` for functions and triggers. Create indexes again with the definition shown, using \
             `create index concurrently`, and set defaults of columns with `alter table`. Restore tables and columns from a \
             backup.",
        ),
    })
}

fn listed(lines: &[&String]) -> String {
    let mut shown: Vec<String> = lines
        .iter()
        .take(LISTED_MAX)
        .map(|line| (*line).clone())
        .collect();
    if lines.len() > LISTED_MAX {
        shown.push(format!("and {} more", lines.len() - LISTED_MAX));
    }
    shown.join("; ")
}
