//! The admin's API key and password, where the operator set none.
//! Invariant: a generated credential is shown once. The database has only its hash.

use anyhow::Context;
use data_encoding::{BASE32_NOPAD, BASE64, BASE64URL_NOPAD};
use postrider_dashboard::Pool;
use sha2::{Digest, Sha256};
use sqlx::PgConnection;

use crate::settings::Settings;

/// The row of the generated key.
const GENERATED_KEY_ID: &str = "key_first_admin";

pub(crate) fn new_api_key() -> String {
    format!("prk_{}", BASE64URL_NOPAD.encode(&rand::random::<[u8; 32]>()))
}

/// 100 bits in characters that are easy to read and type.
pub(crate) fn new_password() -> String {
    BASE32_NOPAD.encode(&rand::random::<[u8; 13]>())[..20].to_lowercase()
}

pub(crate) fn new_master_key() -> String {
    BASE64.encode(&rand::random::<[u8; 32]>())
}

/// What the dashboard role generated, because nothing was set and nothing existed.
#[derive(Default)]
pub(crate) struct Generated {
    api_key: Option<String>,
    password: Option<String>,
}

impl Generated {
    pub(crate) fn print(&self) {
        if let Some(key) = &self.api_key {
            println!("Admin API key (shown only once): {key}");
        }
        if let Some(password) = &self.password {
            println!("Password of the login `admin` (shown only once): {password}");
        }
    }
}

/// For roles without a data directory. Several may start at once: the lock lets only one generate.
pub(crate) async fn create_missing(pool: &Pool, settings: &Settings) -> anyhow::Result<Generated> {
    let mut generated = Generated::default();
    let mut tx = pool.begin().await?;
    sqlx::query("select pg_advisory_xact_lock(hashtext('postrider.first_admin'))")
        .execute(&mut *tx)
        .await?;
    if settings.values.admin_api_key.is_none() {
        let key = new_api_key();
        let inserted = sqlx::query(
            "insert into postrider.api_keys (public_id, hash, role, name, prefix)
             values ($1, $2, 'admin', 'created at first start', left($3, 8)) on conflict (public_id) do nothing",
        )
        .bind(GENERATED_KEY_ID)
        .bind(Sha256::digest(&key).to_vec())
        .bind(&key)
        .execute(&mut *tx)
        .await?;
        generated.api_key = (inserted.rows_affected() == 1).then_some(key);
    }
    match &settings.values.admin_password {
        Some(password) => set_password(&mut tx, password).await?,
        None => {
            let exists: bool =
                sqlx::query_scalar("select exists (select from postrider.people where login = 'admin')")
                    .fetch_one(&mut *tx)
                    .await?;
            if !exists {
                let password = new_password();
                set_password(&mut tx, &password).await?;
                generated.password = Some(password);
            }
        }
    }
    tx.commit().await?;
    Ok(generated)
}

pub(crate) async fn set_password(db: &mut PgConnection, password: &str) -> anyhow::Result<()> {
    postrider_dashboard::set_admin_password(db, password)
        .await
        .context("cannot set the admin's password")
}
