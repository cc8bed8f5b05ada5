//! The first way in: the admin's API key and password, where the operator set none.
//! Invariant: what is made here is shown once. The database has only hashes of it.

use anyhow::Context;
use data_encoding::{BASE32_NOPAD, BASE64, BASE64URL_NOPAD};
use postrider_dashboard::Pool;
use sha2::{Digest, Sha256};
use sqlx::PgConnection;

use crate::settings::Settings;

/// The row that holds the generated key.
const GENERATED_KEY_ID: &str = "key_first_admin";

pub(crate) fn new_api_key() -> String {
    format!("prk_{}", BASE64URL_NOPAD.encode(&rand::random::<[u8; 32]>()))
}

/// 100 bits in letters that can be told apart and typed.
pub(crate) fn new_password() -> String {
    BASE32_NOPAD.encode(&rand::random::<[u8; 13]>())[..20].to_lowercase()
}

pub(crate) fn new_master_key() -> String {
    BASE64.encode(&rand::random::<[u8; 32]>())
}

/// What the dashboard role made because nothing was set and nothing was there.
#[derive(Default)]
pub(crate) struct Made {
    pub(crate) api_key: Option<String>,
    pub(crate) password: Option<String>,
}

/// For roles without a data directory. Several of them may start at once: one makes, the others find.
pub(crate) async fn make_missing(pool: &Pool, settings: &Settings) -> anyhow::Result<Made> {
    let mut made = Made::default();
    let mut tx = pool.begin().await?;
    sqlx::query("select pg_advisory_xact_lock(hashtext('postrider.first_admin'))")
        .execute(&mut *tx)
        .await?;
    if settings.admin_api_key.is_none() {
        let key = new_api_key();
        let inserted = sqlx::query(
            "insert into postrider.api_keys (public_id, hash, role, name)
             values ($1, $2, 'admin', 'made at the first start') on conflict (public_id) do nothing",
        )
        .bind(GENERATED_KEY_ID)
        .bind(Sha256::digest(&key).to_vec())
        .execute(&mut *tx)
        .await?;
        made.api_key = (inserted.rows_affected() == 1).then_some(key);
    }
    match &settings.admin_password {
        Some(password) => set_password(&mut tx, password).await?,
        None => {
            let exists: bool =
                sqlx::query_scalar("select exists (select from postrider.people where login = 'admin')")
                    .fetch_one(&mut *tx)
                    .await?;
            if !exists {
                let password = new_password();
                set_password(&mut tx, &password).await?;
                made.password = Some(password);
            }
        }
    }
    tx.commit().await?;
    Ok(made)
}

pub(crate) async fn set_password(db: &mut PgConnection, password: &str) -> anyhow::Result<()> {
    postrider_dashboard::set_admin_password(db, password)
        .await
        .context("the admin's password could not be set")
}
