//! `rotate-master-key`: encrypts stored secrets with the first key of `POSTRIDER_MASTER_KEY`, without downtime.

use anyhow::bail;
use postrider_dispatcher::{
    key_holders::{self, HELD_SECONDS},
    schema, sealed,
    vault::Vault,
};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::{connect, settings::Settings};

/// `force` skips the check that every running role has the new key.
pub(crate) async fn rotate(settings: Settings, force: bool, stop: CancellationToken) -> anyhow::Result<()> {
    let database = settings.require_database()?;
    let vault = settings.require_vault()?;
    let pool = connect::pool(&database.direct, "rotate-master-key").await?;
    schema::check(&mut *pool.acquire().await?).await?;
    if !force {
        refuse_to_lock_out(&pool, &vault).await?;
    }
    let work = sealed::encrypt_anew(&pool, &vault, |progress| {
        println!("{}: {} of {}", progress.name, progress.done, progress.total);
    });
    tokio::select! {
        changed = work => {
            let changed = changed?;
            write_audit(&pool, changed).await?;
            println!("{changed} values encrypted with the first key. The other keys are no longer needed.");
        }
        () = stop.cancelled() => println!("Stopped. Run the command again to continue."),
    }
    pool.close().await;
    Ok(())
}

async fn refuse_to_lock_out(pool: &PgPool, vault: &Vault) -> anyhow::Result<()> {
    let lacking = key_holders::lacking(pool, vault).await?;
    if lacking.is_empty() {
        return Ok(());
    }
    bail!(
        "these roles run without the first key of POSTRIDER_MASTER_KEY and could not read secrets encrypted with it: {}. \
         Nothing was changed. Restart them with both keys first. A role that was killed is removed from this list after {HELD_SECONDS} \
         seconds; --force continues anyway",
        key_holders::named(&lacking)
    )
}

async fn write_audit(pool: &PgPool, changed: u64) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into postrider.audit (actor, action, subject, detail)
         values ('operator', 'master_key.rotated', 'master key', jsonb_build_object('values', $1::bigint))",
    )
    .bind(changed as i64)
    .execute(pool)
    .await?;
    Ok(())
}
