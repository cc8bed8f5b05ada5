//! The SQL: one file per table, one function per statement. Only that file writes its table; statements that move a
//! delivery between tables are in `replay`.

pub(crate) mod activity;
pub(crate) mod alerts;
pub(crate) mod api_keys;
pub(crate) mod attempts;
pub(crate) mod audit;
pub(crate) mod cells;
pub(crate) mod dead_letters;
pub(crate) mod deliveries;
mod delivery_scope;
pub(crate) mod endpoint_health;
pub(crate) mod endpoints;
pub(crate) mod event_list;
pub(crate) mod event_types;
pub(crate) mod events;
pub(crate) mod failures;
pub(crate) mod first_steps;
pub(crate) mod form_results;
pub(crate) mod holds;
pub(crate) mod idempotency;
pub(crate) mod listeners;
pub(crate) mod log_filter;
pub(crate) mod neighbours;
pub(crate) mod pending;
pub(crate) mod people;
pub(crate) mod pool;
pub(crate) mod portal_links;
pub(crate) mod queue;
pub(crate) mod quotas;
pub(crate) mod retries;
pub(crate) mod rotations;
pub(crate) mod schemas;
pub(crate) mod search;
pub(crate) mod secrets;
pub(crate) mod sessions;
pub(crate) mod statistics;
pub(crate) mod system;
pub(crate) mod tenants;
pub(crate) mod trials;

use chrono::{DateTime, Utc};
use data_encoding::BASE32HEX_NOPAD;
use sqlx::{PgExecutor, Postgres, Transaction};

use crate::Pool;

/// A transaction for a request, with short lock and statement timeouts.
pub(crate) async fn begin(pool: &Pool) -> sqlx::Result<Transaction<'static, Postgres>> {
    pool.begin_request().await
}

/// The database's clock.
pub(crate) async fn now(db: impl PgExecutor<'_>) -> sqlx::Result<DateTime<Utc>> {
    sqlx::query_scalar("select clock_timestamp()").fetch_one(db).await
}

/// A prefix and 24 random letters and digits: 120 bits, so that ids can't be guessed.
pub(crate) fn random_public_id(prefix: &str) -> String {
    let bytes: [u8; 15] = rand::random();
    format!("{prefix}_{}", BASE32HEX_NOPAD.encode(&bytes).to_ascii_lowercase())
}

/// Whether the text has the form of `random_public_id`. Others are not looked up.
pub(crate) fn is_public_id(prefix: &str, text: &str) -> bool {
    text.strip_prefix(prefix)
        .and_then(|rest| rest.strip_prefix('_'))
        .is_some_and(|rest| {
            rest.len() == 24 && rest.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_ids_have_a_form_and_differ() {
        let id = random_public_id("ep");
        assert!(is_public_id("ep", &id), "{id}");
        assert!(!is_public_id("key", &id));
        assert_ne!(id, random_public_id("ep"));
        for bad in ["ep_", "ep", "", "ep_\0", &format!("{id}a"), &id.to_uppercase()] {
            assert!(!is_public_id("ep", bad), "{bad:?}");
        }
    }
}
