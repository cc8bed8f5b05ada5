//! Scheduled secret rotation: announced to the tenant, then replaced, with an overlap in which both secrets sign. Run
//! by a duty of `jobs`.
//! Invariant: each step is one transaction that first checks that it is still wanted. It can be repeated, run on two
//! machines at once or be interrupted, and still happens once.

use chrono::{DateTime, SecondsFormat, Utc};
use postrider_proto::{
    EndpointId, TenantId,
    signature::{Secret, SignatureFormat},
};
use serde_json::json;
use sqlx::{FromRow, PgConnection, PgPool};

use crate::{
    bind::BindAll,
    health::database::warn_unless_outage,
    maintenance::notices,
    vault::{Owner, Purpose, Vault},
};

/// How long before its rotation a secret is announced.
pub const ANNOUNCED_DAYS: i32 = 3;
/// How long the old secret keeps signing; nobody is present to ask for more.
pub const OVERLAP_SECONDS: i32 = 3 * 24 * 60 * 60;
/// Each one signs every request.
pub const SECRETS_IN_FORCE_MAX: i64 = 3;
/// Rotations fetched by one statement.
const BATCH: i64 = 200;

#[derive(Debug, FromRow)]
struct Wanted {
    secret_id: i32,
    endpoint_id: EndpointId,
    public_id: String,
    url: String,
    tenant_id: TenantId,
    rotates_at: DateTime<Utc>,
}

#[derive(Debug, FromRow)]
struct Subject {
    public_id: String,
    tenant_id: TenantId,
    signature: SignatureFormat,
    /// It exists, its policy still applies, and the secret was not replaced manually.
    still_wanted: bool,
    in_force: i64,
}

/// Counts for the log and for tests.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    pub announced: u64,
    pub rotated: u64,
}

/// A rotation announced to subscribed endpoints: some days before a scheduled one, and together with a manual one.
#[derive(Debug, Clone, Copy)]
pub struct Rotating<'a> {
    pub tenant: TenantId,
    pub endpoint: &'a str,
    pub url: &'a str,
    pub rotates_at: DateTime<Utc>,
    pub overlap_seconds: i32,
}

impl Rotating<'_> {
    fn at(&self) -> String {
        self.rotates_at.to_rfc3339_opts(SecondsFormat::Secs, true)
    }

    /// Runs in the caller's transaction. Returns why the tenant was not notified, if it was not.
    pub async fn announce(&self, connection: &mut PgConnection) -> Result<Option<String>, sqlx::Error> {
        let data = json!({
            "endpoint": self.endpoint,
            "url": self.url,
            "rotates_at": self.at(),
            "overlap_seconds": self.overlap_seconds,
        });
        notices::announce(connection, self.tenant, "postrider.secret.rotating", &data).await
    }
}

/// Announces and rotates everything due by the database's clock.
pub async fn run(pool: &PgPool, vault: &Vault) -> Result<Done, sqlx::Error> {
    let mut done = Done::default();
    let mut after = 0;
    loop {
        let wanted = to_announce(pool, after).await?;
        let Some(last) = wanted.last() else { break };
        after = last.secret_id;
        for one in &wanted {
            done.announced += u64::from(or_later(announce(pool, one).await, one.endpoint_id)?);
        }
    }
    let mut after = 0;
    loop {
        let due = due(pool, after).await?;
        let Some((last, _)) = due.last() else { break };
        after = *last;
        for (secret, endpoint) in due {
            done.rotated += u64::from(or_later(rotate(pool, vault, secret, endpoint).await, endpoint)?);
        }
    }
    Ok(done)
}

/// A database error for one endpoint is retried in the next run; the others continue.
fn or_later(done: Result<bool, sqlx::Error>, endpoint: EndpointId) -> Result<bool, sqlx::Error> {
    match done {
        Err(error @ sqlx::Error::Database(_)) => {
            warn_unless_outage!(error, %endpoint, "scheduled rotation failed; retrying in the next run");
            Ok(false)
        }
        done => done,
    }
}

/// A policy set on an old secret still gives advance notice.
async fn to_announce(pool: &PgPool, after: i32) -> Result<Vec<Wanted>, sqlx::Error> {
    sqlx::query_as(include_str!("sql/rotations_to_announce.sql"))
        .bind_all((ANNOUNCED_DAYS, after, BATCH))
        .fetch_all(pool)
        .await
}

/// The plan, the event and the audit entry, atomically.
async fn announce(pool: &PgPool, wanted: &Wanted) -> Result<bool, sqlx::Error> {
    let mut tx = pool.begin().await?;
    let planned = sqlx::query(
        "insert into postrider.planned_rotations (secret_id, endpoint_id, rotates_at) values ($1, $2, $3)
         on conflict do nothing",
    )
    .bind_all((wanted.secret_id, wanted.endpoint_id, wanted.rotates_at))
    .execute(&mut *tx)
    .await?;
    if planned.rows_affected() == 0 {
        return Ok(false);
    }
    let about = Rotating {
        tenant: wanted.tenant_id,
        endpoint: &wanted.public_id,
        url: &wanted.url,
        rotates_at: wanted.rotates_at,
        overlap_seconds: OVERLAP_SECONDS,
    };
    if let Some(refusal) = about.announce(&mut tx).await? {
        // The tenant was just deleted, or the event type was removed. Nothing was planned; it is retried.
        let endpoint = &wanted.public_id;
        tracing::warn!(endpoint, refusal, "announcing a rotation failed; retrying");
        return Ok(false);
    }
    let detail = json!({ "rotates_at": about.at() });
    let (tenant, endpoint) = (wanted.tenant_id, &wanted.public_id);
    notices::write_audit(&mut tx, "secret.rotation_announced", tenant, endpoint, detail).await?;
    tx.commit().await?;
    Ok(true)
}

async fn due(pool: &PgPool, after: i32) -> Result<Vec<(i32, EndpointId)>, sqlx::Error> {
    sqlx::query_as(
        "select secret_id, endpoint_id from postrider.planned_rotations
         where rotates_at <= clock_timestamp() and secret_id > $1
           and exists (select from postrider.endpoints e join postrider.tenants t on t.id = e.tenant_id
                       where e.id = endpoint_id and t.is_here)
         order by secret_id limit $2",
    )
    .bind_all((after, BATCH))
    .fetch_all(pool)
    .await
}

/// Under the endpoint's lock, like a manual rotation.
async fn rotate(
    pool: &PgPool,
    vault: &Vault,
    secret: i32,
    endpoint: EndpointId,
) -> Result<bool, sqlx::Error> {
    let mut tx = pool.begin().await?;
    let tenant_is_here = sqlx::query(
        "select from postrider.endpoints e join postrider.tenants t on t.id = e.tenant_id and t.is_here
         where e.id = $1 for share of t",
    )
    .bind(endpoint)
    .fetch_optional(&mut *tx)
    .await?;
    if tenant_is_here.is_none() {
        return Ok(false);
    }
    sqlx::query("select from postrider.endpoints where id = $1 for no key update")
        .bind(endpoint)
        .execute(&mut *tx)
        .await?;
    let subject: Subject = sqlx::query_as(
        "select e.public_id, e.tenant_id, e.signature,
                e.state <> 'deleted' and t.deleted_at is null
                  and coalesce(e.rotate_every_days, t.rotate_every_days, 0) > 0
                  and exists (select from postrider.secrets s where s.id = $2 and s.retires_at is null)
                  and exists (select from postrider.planned_rotations p where p.secret_id = $2) as still_wanted,
                (select count(*) from postrider.secrets s where s.endpoint_id = e.id
                   and (s.retires_at is null or s.retires_at > clock_timestamp())) as in_force
         from postrider.endpoints e join postrider.tenants t on t.id = e.tenant_id where e.id = $1",
    )
    .bind_all((endpoint, secret))
    .fetch_one(&mut *tx)
    .await?;
    if subject.still_wanted && subject.in_force >= SECRETS_IN_FORCE_MAX {
        tracing::info!(
            endpoint = subject.public_id,
            "scheduled rotation postponed until an older secret has expired"
        );
        return Ok(false);
    }
    sqlx::query("delete from postrider.planned_rotations where secret_id = $1")
        .bind(secret)
        .execute(&mut *tx)
        .await?;
    if subject.still_wanted {
        replace(&mut tx, vault, endpoint, &subject).await?;
    }
    tx.commit().await?;
    Ok(subject.still_wanted)
}

async fn replace(
    tx: &mut PgConnection,
    vault: &Vault,
    endpoint: EndpointId,
    subject: &Subject,
) -> Result<(), sqlx::Error> {
    let owner = Owner {
        tenant: subject.tenant_id,
        endpoint,
    };
    let secret = Secret::generate(subject.signature, &rand::random());
    sqlx::query(
        "update postrider.secrets set retires_at = clock_timestamp() + make_interval(secs => $2)
         where endpoint_id = $1 and retires_at is null",
    )
    .bind_all((endpoint, f64::from(OVERLAP_SECONDS)))
    .execute(&mut *tx)
    .await?;
    sqlx::query("insert into postrider.secrets (endpoint_id, ciphertext, public_key) values ($1, $2, $3)")
        .bind(endpoint)
        .bind(vault.seal(owner, Purpose::Secret, secret.reveal().as_bytes()))
        .bind(secret.public_key().map(|key| key.to_string()))
        .execute(&mut *tx)
        .await?;
    let detail = json!({ "overlap_seconds": OVERLAP_SECONDS, "planned": true });
    notices::write_audit(
        tx,
        "secret.rotated",
        subject.tenant_id,
        &subject.public_id,
        detail,
    )
    .await
}
