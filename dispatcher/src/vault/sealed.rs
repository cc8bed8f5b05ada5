//! Where sealed values are stored: checked before a role starts, and re-encrypted when the master key changes.
//! Invariant: every column with sealed values of endpoints and cells is listed in `COLUMNS`, or a change of the master key
//! would lose it. Stored responses, which are bound to their request, and results of forms, which are bound to their session,
//! have separate statements.

use postrider_proto::{EndpointId, TenantId};
use sqlx::{FromRow, PgConnection, PgPool};

use crate::{
    bind::BindAll,
    vault::{KEY_NAME_BYTES, Owner, Purpose, Vault},
};

/// Values re-encrypted in one transaction.
const BATCH: i64 = 500;

struct Column {
    /// Name shown to operators.
    name: &'static str,
    purpose: Purpose,
    /// One value for each key that values are encrypted with.
    samples: &'static str,
    /// Values after `$1` that are not encrypted with the key `$2`, at most `$3`.
    others: &'static str,
    /// `$1` are their ids, `$2` the values read, `$3` the re-encrypted ones. Values changed meanwhile are left alone.
    replace: &'static str,
}

const COLUMNS: [Column; 4] = [
    Column {
        name: "secrets",
        purpose: Purpose::Secret,
        samples: "select distinct on (substr(s.ciphertext, 1, 4)) s.id, e.tenant_id, s.endpoint_id, s.ciphertext as sealed
                  from postrider.secrets s join postrider.endpoints e on e.id = s.endpoint_id
                  order by substr(s.ciphertext, 1, 4), s.id desc",
        others: "select s.id, e.tenant_id, s.endpoint_id, s.ciphertext as sealed
                 from postrider.secrets s join postrider.endpoints e on e.id = s.endpoint_id
                 where s.id > $1 and substr(s.ciphertext, 1, 4) <> $2 order by s.id limit $3",
        replace: "update postrider.secrets s set ciphertext = n.sealed
                  from unnest($1::int[], $2::bytea[], $3::bytea[]) as n(id, read, sealed)
                  where s.id = n.id and s.ciphertext = n.read",
    },
    Column {
        name: "headers",
        purpose: Purpose::Headers,
        samples: "select distinct on (substr(headers, 1, 4)) id, tenant_id, id as endpoint_id, headers as sealed
                  from postrider.endpoints where headers is not null
                  order by substr(headers, 1, 4), id desc",
        others: "select id, tenant_id, id as endpoint_id, headers as sealed from postrider.endpoints
                 where headers is not null and id > $1 and substr(headers, 1, 4) <> $2 order by id limit $3",
        replace: "update postrider.endpoints e set headers = n.sealed
                  from unnest($1::int[], $2::bytea[], $3::bytea[]) as n(id, read, sealed)
                  where e.id = n.id and e.headers = n.read",
    },
    Column {
        name: "certificates",
        purpose: Purpose::Tls,
        samples: "select distinct on (substr(tls, 1, 4)) id, tenant_id, id as endpoint_id, tls as sealed
                  from postrider.endpoints where tls is not null
                  order by substr(tls, 1, 4), id desc",
        others: "select id, tenant_id, id as endpoint_id, tls as sealed from postrider.endpoints
                 where tls is not null and id > $1 and substr(tls, 1, 4) <> $2 order by id limit $3",
        replace: "update postrider.endpoints e set tls = n.sealed
                  from unnest($1::int[], $2::bytea[], $3::bytea[]) as n(id, read, sealed)
                  where e.id = n.id and e.tls = n.read",
    },
    // At home, which has them. The owner is as in `Owner::of_cell`.
    Column {
        name: "addresses of cells",
        purpose: Purpose::CellUrl,
        samples: "select distinct on (substr(url, 1, 4)) id::int, 0 as tenant_id, id::int as endpoint_id, url as sealed
                  from postrider.cells where url is not null
                  order by substr(url, 1, 4), id desc",
        others: "select id::int, 0 as tenant_id, id::int as endpoint_id, url as sealed from postrider.cells
                 where url is not null and id > $1::int and substr(url, 1, 4) <> $2 order by id limit $3",
        replace: "update postrider.cells c set url = n.sealed
                  from unnest($1::int[], $2::bytea[], $3::bytea[]) as n(id, read, sealed)
                  where c.id = n.id and c.url = n.read",
    },
];

#[derive(FromRow)]
struct Row {
    id: i32,
    tenant_id: TenantId,
    endpoint_id: EndpointId,
    sealed: Vec<u8>,
}

impl Row {
    fn owner(&self) -> Owner {
        Owner {
            tenant: self.tenant_id,
            endpoint: self.endpoint_id,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SealedError {
    #[error(
        "POSTRIDER_MASTER_KEY is not the key that the stored {0} are encrypted with: set the key they were made with, \
         or add it behind the new one, with a comma between them"
    )]
    WrongKey(&'static str),
    #[error(
        "{count} of the stored {name} open with none of the keys in POSTRIDER_MASTER_KEY and were left as they are: \
         add the key they were made with and run this again"
    )]
    Left { name: &'static str, count: u64 },
    #[error("database error: {0}")]
    Database(#[from] sqlx::Error),
}

/// Decrypts one stored value of each key ever used. A role with a wrong key would otherwise start and sign nothing.
pub async fn check(db: &mut PgConnection, vault: &Vault) -> Result<(), SealedError> {
    for column in &COLUMNS {
        let samples: Vec<Row> = sqlx::query_as(column.samples).fetch_all(&mut *db).await?;
        for row in samples {
            vault
                .open(row.owner(), column.purpose, &row.sealed)
                .map_err(|_| SealedError::WrongKey(column.name))?;
        }
    }
    Ok(())
}

/// Whether anything encrypted with a master key is stored.
pub async fn is_any(pool: &PgPool) -> Result<bool, sqlx::Error> {
    for column in &COLUMNS {
        if sqlx::query(column.samples).fetch_optional(pool).await?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Progress of a master key change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub name: &'static str,
    pub done: u64,
    pub total: u64,
}

/// Re-encrypts everything that does not use the first key. May be interrupted and run again; concurrent changes are
/// never overwritten. Returns how many values it has changed.
pub async fn encrypt_anew(
    pool: &PgPool,
    vault: &Vault,
    mut report: impl FnMut(Progress),
) -> Result<u64, SealedError> {
    let mut changed = 0;
    for column in &COLUMNS {
        let total = count(pool, column, vault.first_key()).await?;
        let mut done = 0;
        let mut left = 0;
        let mut after = 0;
        loop {
            let rows: Vec<Row> = sqlx::query_as(column.others)
                .bind_all((after, vault.first_key().as_slice(), BATCH))
                .fetch_all(pool)
                .await?;
            let Some(last) = rows.last() else { break };
            after = last.id;
            let (mut ids, mut read, mut sealed) = (Vec::new(), Vec::new(), Vec::new());
            for row in rows {
                match vault.open(row.owner(), column.purpose, &row.sealed) {
                    Ok(clear) => {
                        ids.push(row.id);
                        sealed.push(vault.seal(row.owner(), column.purpose, &clear));
                        read.push(row.sealed);
                    }
                    Err(_) => left += 1,
                }
            }
            let replaced = sqlx::query(column.replace)
                .bind_all((&ids, &read, &sealed))
                .execute(pool)
                .await?;
            changed += replaced.rows_affected();
            done += ids.len() as u64;
            report(Progress {
                name: column.name,
                done,
                total: total.max(done),
            });
        }
        if left > 0 {
            return Err(SealedError::Left {
                name: column.name,
                count: left,
            });
        }
    }
    changed += reencrypt_responses(pool, vault, &mut report).await?;
    Ok(changed + reencrypt_results(pool, vault, &mut report).await?)
}

/// What the result of a form is bound to: its row and the session that submitted the form.
pub fn result_scope(public_id: &str, session: &[u8]) -> Vec<u8> {
    [public_id.as_bytes(), session].concat()
}

/// Results of forms are kept for ten minutes and are few. One that does not decrypt is skipped: it is not shown.
async fn reencrypt_results(
    pool: &PgPool,
    vault: &Vault,
    report: &mut impl FnMut(Progress),
) -> Result<u64, SealedError> {
    let mut done = 0;
    let mut after = String::new();
    loop {
        let rows: Vec<(String, Vec<u8>, Vec<u8>)> = sqlx::query_as(
            "select public_id, session, sealed from postrider.form_results
             where public_id > $1 and substr(sealed, 1, 4) <> $2 order by public_id limit $3",
        )
        .bind_all((&after, vault.first_key().as_slice(), BATCH))
        .fetch_all(pool)
        .await?;
        let Some((last, _, _)) = rows.last() else {
            return Ok(done);
        };
        after.clone_from(last);
        let (ids, sealed): (Vec<String>, Vec<Vec<u8>>) = rows
            .into_iter()
            .filter_map(|(id, session, sealed)| {
                let scope = result_scope(&id, &session);
                let clear = vault.open_response(&scope, &sealed).ok()?;
                Some((id, vault.seal_response(&scope, &clear)))
            })
            .unzip();
        // A result never changes; one that was shown meanwhile is gone.
        let replaced = sqlx::query(
            "update postrider.form_results r set sealed = n.sealed
             from unnest($1::text[], $2::bytea[]) as n(public_id, sealed) where r.public_id = n.public_id",
        )
        .bind_all((&ids, &sealed))
        .execute(pool)
        .await?;
        done += replaced.rows_affected();
        report(Progress {
            name: "results of forms",
            done,
            total: done,
        });
    }
}

/// A response that does not decrypt is skipped: it expires in three days, and a repeated request reports it.
async fn reencrypt_responses(
    pool: &PgPool,
    vault: &Vault,
    report: &mut impl FnMut(Progress),
) -> Result<u64, SealedError> {
    let mut done = 0;
    let mut after = Vec::new();
    loop {
        let rows: Vec<(Vec<u8>, Vec<u8>)> = sqlx::query_as(
            "select scope, response from postrider.idempotency
             where scope > $1 and substr(response, 1, 4) <> $2 order by scope limit $3",
        )
        .bind_all((&after, vault.first_key().as_slice(), BATCH))
        .fetch_all(pool)
        .await?;
        let Some((last, _)) = rows.last() else {
            return Ok(done);
        };
        after.clone_from(last);
        let (scopes, sealed): (Vec<Vec<u8>>, Vec<Vec<u8>>) = rows
            .into_iter()
            .filter_map(|(scope, response)| {
                let clear = vault.open_response(&scope, &response).ok()?;
                let sealed = vault.seal_response(&scope, &clear);
                Some((scope, sealed))
            })
            .unzip();
        // A stored response never changes, so there is nothing to compare.
        let replaced = sqlx::query(
            "update postrider.idempotency i set response = n.sealed
             from unnest($1::bytea[], $2::bytea[]) as n(scope, sealed) where i.scope = n.scope",
        )
        .bind_all((&scopes, &sealed))
        .execute(pool)
        .await?;
        done += replaced.rows_affected();
        report(Progress {
            name: "stored responses",
            done,
            total: done,
        });
    }
}

/// The same query from id 0 without a limit, counted.
async fn count(pool: &PgPool, column: &Column, first_key: &[u8; KEY_NAME_BYTES]) -> Result<u64, sqlx::Error> {
    let query = format!("select count(*) from ({}) others", column.others);
    let count: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
        .bind_all((0, first_key.as_slice(), i64::MAX))
        .fetch_one(pool)
        .await?;
    Ok(count.max(0) as u64)
}
