//! `rotate-master-key`: encrypts what is kept with the first key of `POSTRIDER_MASTER_KEY`, while everything runs.

use postrider_dispatcher::{schema, sealed};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::{connect, settings::Settings};

pub(crate) async fn rotate(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    let database = settings.require_database()?;
    let vault = settings.require_vault()?;
    let pool = connect::pool(&database.pooled, "rotate-master-key").await?;
    schema::check(&pool).await?;
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
