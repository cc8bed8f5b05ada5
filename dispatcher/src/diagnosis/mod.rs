//! What `postrider doctor` checks: the database, its schema, the work in it, and what this machine needs in order to send.
//! Invariant: nothing is changed and nothing is sent; no finding contains a secret, a URL or a tenant's data.

mod cells;
mod drift;
mod egress;
mod facts;
mod hosts;
mod server;
mod work;

use std::{fmt::Display, time::Duration};

use serde::Serialize;
use sqlx::{Connection, PgConnection};

use crate::{
    connector::Connector,
    db_timeout::within,
    http::guard::Guard,
    vault::{Vault, key_holders, sealed},
};

pub use drift::inventory;
pub use facts::facts;

/// A statement that takes longer is a finding of its own.
const STATEMENT_TIMEOUT: (&str, &str) = ("statement_timeout", "10s");
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    Warning,
    Error,
}

impl Verdict {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub check: &'static str,
    pub verdict: Verdict,
    pub found: String,
    /// What to do about it.
    pub advice: Option<String>,
    /// What was found, without words of people and programs other than ours.
    #[serde(skip)]
    impersonal: Option<String>,
}

impl Finding {
    pub fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self {
            check,
            verdict: Verdict::Ok,
            found: found.into(),
            advice: None,
            impersonal: None,
        }
    }

    /// With what a support bundle says instead.
    fn in_bundles(self, found: impl Into<String>) -> Self {
        Self {
            impersonal: Some(found.into()),
            ..self
        }
    }

    /// As it may be given to others.
    pub fn for_bundle(&self) -> Self {
        let found = self.impersonal.as_ref().unwrap_or(&self.found);
        Self {
            found: found.clone(),
            ..self.clone()
        }
    }

    pub fn warning(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Warning,
            advice: Some(advice.into()),
            ..Self::ok(check, found)
        }
    }

    pub fn error(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Error,
            ..Self::warning(check, found, advice)
        }
    }

    fn unknown(check: &'static str, error: impl Display) -> Self {
        Self::error(
            check,
            format!("could not be checked: {error}"),
            "Fix the other errors first, then run this again.",
        )
    }
}

/// `1 dispatcher`, `2 dispatchers`.
pub fn counted(count: impl Into<i64>, one: &str, several: &str) -> String {
    let count = count.into();
    format!("{count} {}", if count == 1 { one } else { several })
}

/// What a diagnosis needs to know.
pub struct Patient {
    pub database: Connector,
    pub replica: Option<Connector>,
    /// In a cell: the home database.
    pub home: Option<Connector>,
    pub vault: Option<Vault>,
    pub guard: Guard,
}

/// One check, named.
macro_rules! check {
    ($findings:ident, $name:literal, $check:expr) => {
        $findings.push(
            $check
                .await
                .unwrap_or_else(|error| Finding::unknown($name, error)),
        )
    };
}

impl Patient {
    /// Every check. Without a database there are few.
    pub async fn examine(&self) -> Vec<Finding> {
        let mut findings = vec![egress::certificates()];
        let database = self.database.with(|options| options.options([STATEMENT_TIMEOUT]));
        let connected = within(CONNECT_TIME_MAX, database.connect()).await;
        let mut connection = match connected {
            Ok(connection) => connection,
            Err(error) => {
                let advice = "Check POSTRIDER_DATABASE_URL, the network and the server.";
                findings.push(Finding::error("database.connection", error.to_string(), advice));
                return findings;
            }
        };
        self.examine_database(&mut connection, &mut findings).await;
        let _ = connection.close().await;
        findings.sort_by_key(|finding| finding.check);
        findings
    }

    async fn examine_database(&self, db: &mut PgConnection, findings: &mut Vec<Finding>) {
        check!(findings, "database.version", server::version(db));
        check!(findings, "database.durability", server::durability(db));
        check!(findings, "database.writes", server::writes(db));
        check!(findings, "database.connections", server::connections(db));
        check!(findings, "database.clock", server::clock(db));
        check!(findings, "database.autovacuum", server::autovacuum(db));
        check!(findings, "database.transactions", server::transactions(db));
        check!(findings, "database.replication", server::replication(db));
        if let Some(replica) = &self.replica {
            findings.push(server::read_replica(replica).await);
        }
        if let Some(hosts) = self.database.ask_hosts().await {
            findings.push(hosts::finding(&hosts));
        }
        let versions = drift::version(db).await;
        let has_schema = versions.verdict != Verdict::Error;
        findings.push(versions);
        if !has_schema {
            return;
        }
        check!(findings, "schema.drift", drift::objects(db));
        check!(findings, "database.rights", server::rights(db));
        check!(findings, "database.dead_rows", server::dead_rows(db));
        check!(findings, "work.sending", work::sending(db));
        check!(findings, "work.partitions", work::partitions(db));
        check!(findings, "work.leases", work::leases(db));
        check!(findings, "work.stuck", work::stuck(db));
        check!(findings, "work.retries", work::retries(db));
        match cells::findings(db, self.home.as_ref()).await {
            Ok(found) => findings.extend(found),
            Err(error) => findings.push(Finding::unknown("cells.directory", error)),
        }
        findings.push(self.master_key(db).await);
        findings.extend(egress::endpoints(db, &self.guard).await);
    }

    async fn master_key(&self, db: &mut PgConnection) -> Finding {
        const CHECK: &str = "secrets.master_key";
        let Some(vault) = &self.vault else {
            let advice = "Run this with the POSTRIDER_MASTER_KEY of the installation to check it.";
            return Finding::warning(CHECK, "POSTRIDER_MASTER_KEY is not set here", advice);
        };
        if let Err(error) = sealed::check(db, vault).await {
            let advice = "Set the key that the secrets were encrypted with: docs/rotation.md.";
            return Finding::error(CHECK, error.to_string(), advice);
        }
        match key_holders::lacking(&mut *db, vault).await {
            Err(error) => Finding::unknown(CHECK, error),
            Ok(lacking) if lacking.is_empty() => Finding::ok(
                CHECK,
                "it decrypts the stored secrets, and all running roles hold it",
            ),
            Ok(lacking) => Finding::warning(
                CHECK,
                format!("roles that run without it: {}", key_holders::named(&lacking)),
                "Restart them with this key before you rotate to it: docs/rotation.md.",
            ),
        }
    }
}
