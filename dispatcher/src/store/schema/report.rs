//! What a migration would apply, or has applied.

use std::fmt;

use sqlx::PgConnection;

use super::{SchemaError, SchemaSet, applied_migrations, functions, indexes};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Numbers and names.
    pub migrations: Vec<(i64, String)>,
    /// Function files.
    pub functions: Vec<String>,
    /// Indexes of tables in use.
    pub indexes: Vec<String>,
    /// The version of a schema that is newer than this program and compatible with it: nothing is applied.
    pub newer: Option<i64>,
}

impl Report {
    pub fn is_empty(&self) -> bool {
        self.migrations.is_empty() && self.functions.is_empty() && self.indexes.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let migrations = self
            .migrations
            .iter()
            .map(|(version, name)| format!("migration {version:04} {name}"));
        let functions = self.functions.iter().map(|file| format!("functions {file}"));
        let indexes = self.indexes.iter().map(|name| format!("index {name}"));
        let parts: Vec<String> = migrations.chain(functions).chain(indexes).collect();
        f.write_str(&parts.join(", "))
    }
}

/// What is left to apply.
pub(super) async fn pending(connection: &mut PgConnection, set: &SchemaSet) -> Result<Report, SchemaError> {
    let applied = applied_migrations(connection, set).await?;
    let found = applied.last().map_or(0, |(version, _)| *version);
    if found > set.version() {
        super::check_compatible(connection, set, found).await?;
        return Ok(Report {
            newer: Some(found),
            ..Report::default()
        });
    }
    let is_applied = |version: i64| applied.iter().any(|(one, _)| *one == version);
    let migrations = set.migrations.iter().filter(|one| !is_applied(one.version));
    let migrations: Vec<(i64, String)> = migrations
        .map(|one| (one.version, one.description.to_string()))
        .collect();
    let mut missing = Vec::new();
    for index in &set.indexes {
        if indexes::is_missing(connection, index).await? {
            missing.push(index.name.to_owned());
        }
    }
    Ok(Report {
        functions: functions::outdated(connection, set).await?,
        migrations,
        indexes: missing,
        newer: None,
    })
}
