//! Which master keys the running roles hold. Each role registers its keys while it runs, so that a change of the
//! master key can detect a role that it would lock out, and so that two roles without a common key do not run side by
//! side: on an empty database nothing else could detect that.

use std::time::Duration;

use sqlx::{FromRow, PgConnection, PgExecutor};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{bind::BindAll, health::database::warn_unless_outage, vault::Vault};

const RENEW_EVERY: Duration = Duration::from_secs(10);
/// A process without a heartbeat for this long is considered gone.
pub const HELD_SECONDS: i32 = 30;
/// Holders named in a refusal.
const STRANGERS_MAX: i64 = 5;

/// A running role, as registered.
#[derive(Debug, Clone, PartialEq, Eq, FromRow)]
pub struct Holder {
    pub role: String,
    pub name: String,
    pub heard_seconds_ago: i64,
}

/// For people.
pub fn named(holders: &[Holder]) -> String {
    let name = |one: &Holder| {
        format!(
            "{} ({}, last seen {} s ago)",
            one.role, one.name, one.heard_seconds_ago
        )
    };
    holders.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// One process, for as long as it runs.
#[derive(Debug, Clone, Copy)]
pub struct Holding {
    id: Uuid,
    role: &'static str,
}

impl Holding {
    /// Registers before the role serves anything, in the caller's transaction: of two that start at once the second
    /// sees the first. Returns a running role that holds none of these keys instead, if there is one.
    pub async fn begin(
        db: &mut PgConnection,
        vault: &Vault,
        role: &'static str,
    ) -> Result<Result<Self, Vec<Holder>>, sqlx::Error> {
        sqlx::query("select pg_advisory_xact_lock(hashtext('postrider.key_holders'))")
            .execute(&mut *db)
            .await?;
        let strangers: Vec<Holder> = sqlx::query_as(
            "select role, name, extract(epoch from clock_timestamp() - heard_at)::bigint as heard_seconds_ago
             from postrider.key_holders
             where expires_at > clock_timestamp() and not keys && $1 order by role, name limit $2",
        )
        .bind_all((vault.key_names(), STRANGERS_MAX))
        .fetch_all(&mut *db)
        .await?;
        if !strangers.is_empty() {
            return Ok(Err(strangers));
        }
        let holding = Self {
            id: Uuid::now_v7(),
            role,
        };
        holding.register(db, vault).await?;
        Ok(Ok(holding))
    }

    /// Runs until stopped.
    pub async fn keep<P>(self, pool: P, vault: Vault, stop: CancellationToken) -> Result<(), sqlx::Error>
    where
        for<'p> &'p P: PgExecutor<'p>,
    {
        loop {
            tokio::select! {
                () = tokio::time::sleep(RENEW_EVERY) => {}
                () = stop.cancelled() => break,
            }
            if let Err(error) = self.register(&pool, &vault).await {
                warn_unless_outage!(error, "registering the master keys failed; retrying");
            }
        }
        let gone =
            sqlx::query("delete from postrider.key_holders where id = $1 or expires_at < clock_timestamp()")
                .bind(self.id)
                .execute(&pool)
                .await;
        if let Err(error) = gone {
            tracing::debug!(%error, "unregistering the master keys failed; the entries will expire");
        }
        Ok(())
    }

    async fn register(&self, db: impl PgExecutor<'_>, vault: &Vault) -> Result<(), sqlx::Error> {
        sqlx::query(
            "insert into postrider.key_holders as h (id, role, name, keys, heard_at, expires_at)
             values ($1, $2, 'process ' || $3 || ' at ' || coalesce(host(inet_client_addr()), 'the database''s machine'),
                     $4, clock_timestamp(), clock_timestamp() + make_interval(secs => $5))
             on conflict (id) do update set heard_at = excluded.heard_at, expires_at = excluded.expires_at",
        )
        .bind_all((self.id, self.role, std::process::id().to_string()))
        .bind_all((vault.key_names(), f64::from(HELD_SECONDS)))
        .execute(db)
        .await?;
        Ok(())
    }
}

/// Running roles that do not hold the encrypting key.
pub async fn lacking(db: impl PgExecutor<'_>, vault: &Vault) -> Result<Vec<Holder>, sqlx::Error> {
    sqlx::query_as(
        "select role, name, extract(epoch from clock_timestamp() - heard_at)::bigint as heard_seconds_ago
         from postrider.key_holders
         where expires_at > clock_timestamp() and not $1 = any(keys) order by role, name",
    )
    .bind(vault.first_key().as_slice())
    .fetch_all(db)
    .await
}
