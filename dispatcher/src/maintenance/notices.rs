//! Operational events: notifications from Postrider itself to a tenant and to the operators.
//!
//! They are written by the very statement that causes them (triggers on `dead_letters` and `endpoint_health` fill
//! `notices`) and emitted from here soon after, once. Alerts check the counts of dead letters.
//! Invariant: an operational event never causes another one about itself.

use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use postrider_proto::{DeadReason, DeliveryId, EndpointId, EventId, TenantId};
use serde_json::{Value, json};
use sqlx::{FromRow, PgConnection, PgPool};
use tokio_util::sync::CancellationToken;

use crate::{Wake, bind::BindAll, deliver::change_watcher::Commits, health::database::warn_unless_outage};

/// Unless notices are notified.
const CHECK_EVERY: Duration = Duration::from_secs(1);
const LOOK_AGAIN_AFTER_ERROR: Duration = Duration::from_secs(5);
/// Notices emitted in one transaction.
const BATCH: i64 = 100;
/// Alerts fired per check.
const ALERTS_MAX: i64 = 100;

/// Emits it to its tenant and to tenants subscribed to all operational events. Returns why the tenant did not get it.
pub(crate) async fn announce(
    connection: &mut PgConnection,
    about: TenantId,
    type_name: &str,
    data: &Value,
) -> Result<Option<String>, sqlx::Error> {
    sqlx::query_scalar("select postrider.announce($1, $2, $3)")
        .bind_all((about, type_name, data))
        .fetch_one(connection)
        .await
}

/// An action of Postrider itself.
pub(crate) async fn write_audit(
    tx: &mut PgConnection,
    action: &str,
    tenant: TenantId,
    subject: &str,
    detail: Value,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into postrider.audit (actor, action, tenant_id, subject, detail) values ('postrider', $1, $2, $3, $4)",
    )
    .bind_all((action, tenant, subject, detail))
    .execute(tx)
    .await?;
    Ok(())
}

/// Emits pending notices. Several processes may run it at once.
#[derive(Clone)]
pub(crate) struct Notifier {
    pub(crate) pool: PgPool,
    pub(crate) wake: Wake,
    pub(crate) commits: Commits,
    pub(crate) public_url: Option<String>,
}

#[derive(FromRow)]
struct Notice {
    id: i64,
    endpoint_id: EndpointId,
    event_id: Option<EventId>,
    reason: Option<DeadReason>,
    attempt: Option<i16>,
    since: Option<DateTime<Utc>>,
    tenant_id: TenantId,
    endpoint: String,
    url: String,
    dead_letters: i64,
}

#[derive(FromRow)]
struct Alert {
    endpoint_id: EndpointId,
    threshold: i64,
    tenant_id: TenantId,
    endpoint: String,
    url: String,
    dead_letters: i64,
}

/// The latest attempt of a dead letter, as far as it is still stored.
#[derive(Default, FromRow)]
struct Last {
    chosen_id: Option<String>,
    type_name: Option<String>,
    reason: Option<DeadReason>,
    status: Option<i16>,
    error: Option<String>,
}

impl Notifier {
    pub(crate) async fn run(&self, stop: &CancellationToken) {
        let mut wait = None;
        loop {
            tokio::select! {
                () = self.wait(wait) => {}
                () = stop.cancelled() => return,
            }
            wait = self.check().await.unwrap_or_else(|error| {
                warn_unless_outage!(error, "emitting operational events failed; retrying");
                Some(LOOK_AGAIN_AFTER_ERROR)
            });
        }
    }

    /// That long, or until there is a notice.
    async fn wait(&self, time: Option<Duration>) {
        match time {
            Some(time) => tokio::time::sleep(time).await,
            None => self.commits.wait_for_notices(CHECK_EVERY).await,
        }
    }

    /// Returns when to check again: at once if there may be more; none: when there is a notice.
    async fn check(&self) -> Result<Option<Duration>, sqlx::Error> {
        let (emitted, pending) = self.emit_notices().await?;
        let alerted = self.alert().await?;
        if emitted + alerted > 0 {
            self.wake.now();
        }
        Ok(match (emitted, pending) {
            (_, 0) => None,
            (0, _) => Some(CHECK_EVERY),
            _ => Some(Duration::ZERO),
        })
    }

    /// Emitted and deleted in one transaction. One that fails stays and does not affect the others. Returns how many were
    /// emitted, and how many there may be left.
    async fn emit_notices(&self) -> Result<(usize, usize), sqlx::Error> {
        let mut tx = self.pool.begin().await?;
        let notices: Vec<Notice> = sqlx::query_as(
            "select n.id, n.endpoint_id, n.event_id, n.reason, n.attempt, n.since, e.tenant_id, e.public_id as endpoint, e.url,
                (select coalesce(sum(c.count), 0)::bigint from postrider.dead_letter_counts c
                 where c.endpoint_id = e.id) as dead_letters
             from postrider.notices n join postrider.endpoints e on e.id = n.endpoint_id
             join postrider.tenants t on t.id = e.tenant_id and t.is_here
             order by n.id limit $1 for update of n skip locked for share of t skip locked",
        )
        .bind(BATCH)
        .fetch_all(&mut *tx)
        .await?;
        if notices.is_empty() {
            tx.commit().await?;
            return Ok((0, 0));
        }
        let mut emitted = Vec::new();
        for notice in &notices {
            let mut part = sqlx::Connection::begin(&mut *tx).await?;
            let done = match (notice.event_id, notice.since) {
                (Some(event), _) => self.announce_dead_letter(&mut part, notice, event).await,
                (None, Some(since)) => self.announce_recovery(&mut part, notice, since).await,
                (None, None) => Ok(()),
            };
            match done {
                Ok(()) => {
                    part.commit().await?;
                    emitted.push(notice.id);
                }
                Err(error @ sqlx::Error::Database(_)) => {
                    part.rollback().await?;
                    warn_unless_outage!(
                        error,
                        endpoint = notice.endpoint,
                        "emitting an operational event failed; retrying"
                    );
                }
                Err(error) => return Err(error),
            }
        }
        sqlx::query("delete from postrider.notices where id = any($1)")
            .bind(&emitted)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        let is_full = notices.len() == BATCH as usize;
        let pending = notices.len() - emitted.len() + usize::from(is_full);
        Ok((emitted.len(), pending))
    }

    async fn announce_dead_letter(
        &self,
        tx: &mut PgConnection,
        notice: &Notice,
        event: EventId,
    ) -> Result<(), sqlx::Error> {
        let endpoint = notice.endpoint_id;
        let delivery = DeliveryId { event, endpoint };
        let last = last_of(tx, delivery, notice.attempt.unwrap_or(0)).await?;
        let data = json!({
            "delivery": delivery.to_string(),
            "event": last.chosen_id.unwrap_or_else(|| event.generated()),
            "type": last.type_name.unwrap_or_default(),
            "endpoint": notice.endpoint,
            "url": notice.url,
            "reason": notice.reason,
            "attempts": notice.attempt.unwrap_or(0),
            "last_status": last.status,
            "last_error": last.error,
            "link": self.link(&format!("/deliveries/{delivery}")),
        });
        announce(tx, notice.tenant_id, "postrider.delivery.dead", &data)
            .await
            .map(drop)
    }

    async fn announce_recovery(
        &self,
        tx: &mut PgConnection,
        notice: &Notice,
        since: DateTime<Utc>,
    ) -> Result<(), sqlx::Error> {
        let data = json!({
            "endpoint": notice.endpoint,
            "url": notice.url,
            "failing_since": since.to_rfc3339_opts(SecondsFormat::Secs, true),
            "dead_letters": notice.dead_letters,
            "link": self.link(&format!("/dead-letters?endpoint={}", notice.endpoint)),
        });
        announce(tx, notice.tenant_id, "postrider.endpoint.recovered", &data)
            .await
            .map(drop)
    }

    /// One event per threshold exceeded. The alert is rearmed when the count falls below it.
    async fn alert(&self) -> Result<usize, sqlx::Error> {
        let changed: Vec<Alert> = sqlx::query_as(include_str!("sql/alerts_to_change.sql"))
            .bind(ALERTS_MAX)
            .fetch_all(&self.pool)
            .await?;
        let mut emitted = 0;
        for alert in &changed {
            match self.pass_alert(alert).await {
                Ok(()) => emitted += 1,
                // A failure does not affect the others.
                Err(error @ sqlx::Error::Database(_)) => {
                    warn_unless_outage!(
                        error,
                        endpoint = alert.endpoint,
                        "emitting an alert failed; retrying"
                    );
                }
                Err(error) => return Err(error),
            }
        }
        Ok(emitted)
    }

    async fn pass_alert(&self, alert: &Alert) -> Result<(), sqlx::Error> {
        let mut tx = self.pool.begin().await?;
        let passed = alert.dead_letters >= alert.threshold;
        let ours = sqlx::query(
            "update postrider.alerts set passed_at = case when $2 then clock_timestamp() end
             where endpoint_id = $1 and (passed_at is null) = $2 and dead_letters = $3
               and exists (select from postrider.endpoints e join postrider.tenants t on t.id = e.tenant_id and t.is_here
                           where e.id = endpoint_id for share of t)",
        )
        .bind_all((alert.endpoint_id, passed, alert.threshold))
        .execute(&mut *tx)
        .await?;
        if passed && ours.rows_affected() > 0 {
            self.announce_alert(&mut tx, alert).await?;
        }
        tx.commit().await
    }

    async fn announce_alert(&self, tx: &mut PgConnection, alert: &Alert) -> Result<(), sqlx::Error> {
        let latest: Option<(EventId, i16)> = sqlx::query_as(
            "select event_id, attempt from postrider.dead_letters where endpoint_id = $1
             order by event_id desc limit 1",
        )
        .bind(alert.endpoint_id)
        .fetch_optional(&mut *tx)
        .await?;
        let mut last = Last::default();
        if let Some((event, attempt)) = latest {
            let endpoint = alert.endpoint_id;
            last = last_of(tx, DeliveryId { event, endpoint }, attempt).await?;
        }
        let data = json!({
            "endpoint": alert.endpoint,
            "url": alert.url,
            "dead_letters": alert.dead_letters,
            "threshold": alert.threshold,
            "type": last.type_name,
            "reason": last.reason,
            "last_status": last.status,
            "last_error": last.error,
            "link": self.link(&format!("/dead-letters?endpoint={}", alert.endpoint)),
        });
        announce(tx, alert.tenant_id, "postrider.alert.dead_letters", &data)
            .await
            .map(drop)
    }

    fn link(&self, path: &str) -> Option<String> {
        self.public_url.as_ref().map(|base| format!("{base}{path}"))
    }
}

async fn last_of(tx: &mut PgConnection, id: DeliveryId, attempt: i16) -> Result<Last, sqlx::Error> {
    let found: Option<Last> = sqlx::query_as(include_str!("sql/last_attempt.sql"))
        .bind_all((id.event, id.endpoint, attempt))
        .fetch_optional(tx)
        .await?;
    Ok(found.unwrap_or_default())
}
