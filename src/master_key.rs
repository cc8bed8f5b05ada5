//! `rotate-master-key`: encrypts what is kept with the first key of `POSTRIDER_MASTER_KEY`, while everything runs.

use anyhow::bail;
use postrider_dispatcher::{
    key_holders::{self, HELD_SECONDS},
    schema, sealed,
    vault::Vault,
};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::{connect, settings::Settings};

/// `force` does not ask whether every role that runs holds the new key.
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
            println!("{changed} values are encrypted with the first key now. Nothing needs the other keys any more.");
        }
        () = stop.cancelled() => println!("Stopped. Run it again to go on where it ended."),
    }
    pool.close().await;
    Ok(())
}

async fn refuse_to_lock_out(pool: &PgPool, vault: &Vault) -> anyhow::Result<()> {
    let lacking = key_holders::lacking(pool, vault).await?;
    if lacking.is_empty() {
        return Ok(());
    }
    let named: Vec<String> = lacking.iter().map(ToString::to_string).collect();
    bail!(
        "these run without the first key of POSTRIDER_MASTER_KEY and could read nothing that is encrypted with it: {}. \
         Nothing was changed. Restart them with both keys first. One that was killed is forgotten after {HELD_SECONDS} \
         seconds; --force goes on all the same",
        named.join(", ")
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
