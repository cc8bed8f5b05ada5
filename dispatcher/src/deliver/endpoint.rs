//! An endpoint as the dispatcher sees it: its settings with defaults applied and its secrets decrypted.

use std::{
    num::NonZeroU32,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use chrono::{DateTime, Utc};
use http::HeaderMap;
use postrider_proto::{
    DeadReason, EndpointId, EndpointState, Shard, TenantId,
    filter::Filter,
    signature::{Secret, SignatureFormat},
};
use serde_json::Value;
use sqlx::{FromRow, PgConnection, types::Json};
use url::Url;

use crate::{
    Settings,
    deliver::retry::Schedule,
    http::tls::TlsSettings,
    vault::{
        Owner, Purpose, Vault, VaultError,
        custom_headers::{CustomHeaders, CustomHeadersError},
    },
};

/// Settings are immutable: a change creates a new value.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) id: EndpointId,
    pub(crate) tenant: TenantId,
    /// Public ids, for log lines.
    pub(crate) public_id: Box<str>,
    pub(crate) tenant_name: Box<str>,
    pub(crate) shard: Shard,
    pub(crate) state: EndpointState,
    pub(crate) url: Url,
    pub(crate) concurrency: usize,
    pub(crate) rate_per_second: Option<NonZeroU32>,
    /// One delivery of an ordering key at a time, in sequence.
    pub(crate) ordered: bool,
    /// Reason given to its pending deliveries while it is disabled.
    pub(crate) disabled_reason: DeadReason,
    /// An earlier owner saw no success for a while.
    pub(crate) was_failing: bool,
    pub(crate) schedule: Schedule,
    pub(crate) timeout: Duration,
    pub(crate) format: SignatureFormat,
    pub(crate) headers: HeaderMap,
    /// Per-endpoint certificates.
    pub(crate) tls: Option<TlsSettings>,
    /// Payload filter applied in addition to event types.
    pub(crate) filter: Option<Filter>,
    /// Bulk replays cancelled while some of their deliveries were still queued here.
    pub(crate) cancelled: Vec<String>,
    /// Newest first, each with the time it expires at.
    secrets: Vec<(Secret, Option<DateTime<Utc>>)>,
    /// Set when these settings were replaced or must not be used. Checked just before an attempt starts: otherwise it
    /// could be signed with a secret that was revoked while its body was read.
    stopped: AtomicBool,
}

impl Endpoint {
    pub(crate) fn secrets_in_force(&self, now: DateTime<Utc>) -> Vec<Secret> {
        self.secrets
            .iter()
            .filter(|(_, retires_at)| retires_at.is_none_or(|at| now < at))
            .map(|(secret, _)| secret.clone())
            .collect()
    }

    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    pub(crate) fn may_start(&self) -> bool {
        !self.stopped.load(Ordering::SeqCst)
    }
}

/// A settings row. It does not include pending deliveries, which could take long to read.
#[derive(Debug, FromRow)]
pub(crate) struct EndpointRow {
    pub(crate) id: EndpointId,
    tenant_id: TenantId,
    public_id: String,
    tenant_name: String,
    pub(crate) shard: Shard,
    state: EndpointState,
    url: String,
    state_reason: Option<String>,
    concurrency: Option<i16>,
    rate_per_second: Option<i32>,
    ordered: bool,
    was_failing: bool,
    retry_schedule: Option<Vec<i32>>,
    timeout_ms: Option<i32>,
    signature: SignatureFormat,
    headers: Option<Vec<u8>>,
    tls: Option<Vec<u8>>,
    filter: Option<Json<Value>>,
    secrets: Vec<Vec<u8>>,
    retire: Vec<Option<DateTime<Utc>>>,
    cancelled: Vec<String>,
}

/// Why an endpoint's settings can't be used. Its deliveries stay queued; other endpoints are unaffected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    #[error(transparent)]
    Vault(#[from] VaultError),
    #[error(transparent)]
    Headers(#[from] CustomHeadersError),
    #[error("invalid stored settings: {0}")]
    Stored(String),
}

impl EndpointRow {
    pub(crate) fn open(&self, vault: &Vault, defaults: &Settings) -> Result<Endpoint, Unusable> {
        let stored = |e: &dyn std::fmt::Display| Unusable::Stored(e.to_string());
        let owner = Owner {
            tenant: self.tenant_id,
            endpoint: self.id,
        };
        let secrets = self
            .secrets
            .iter()
            .zip(&self.retire)
            .map(|(sealed, retires_at)| {
                let clear = vault.open(owner, Purpose::Secret, sealed)?;
                let text = String::from_utf8(clear).map_err(|_| Unusable::Stored("a secret".to_owned()))?;
                Ok((Secret::new(text), *retires_at))
            })
            .collect::<Result<Vec<_>, Unusable>>()?;
        let headers = CustomHeaders::open(vault, owner, self.headers.as_deref())?;
        let mut tls = None;
        if let Some(sealed) = &self.tls {
            let clear = vault.open(owner, Purpose::Tls, sealed)?;
            tls = Some(serde_json::from_slice(&clear).map_err(|e| stored(&e))?);
        }
        let schedule = match &self.retry_schedule {
            None => defaults.schedule.clone(),
            Some(waits) => {
                let waits = waits.iter().map(|ms| Duration::from_millis((*ms).max(0) as u64));
                Schedule::new(waits.collect()).map_err(|e| stored(&e))?
            }
        };
        let filter = self.filter.as_ref().map(|filter| Filter::read(&filter.0));
        Ok(Endpoint {
            id: self.id,
            tenant: self.tenant_id,
            public_id: self.public_id.as_str().into(),
            tenant_name: self.tenant_name.as_str().into(),
            shard: self.shard,
            state: self.state,
            url: Url::parse(&self.url).map_err(|e| stored(&e))?,
            concurrency: self
                .concurrency
                .map_or(usize::from(defaults.concurrency), |n| n.max(1) as usize),
            rate_per_second: self
                .rate_per_second
                .and_then(|n| NonZeroU32::new(n.max(0) as u32)),
            ordered: self.ordered,
            disabled_reason: match self.state_reason.as_deref() {
                Some("gone") => DeadReason::Gone,
                _ => DeadReason::EndpointDisabled,
            },
            was_failing: self.was_failing,
            schedule,
            timeout: self
                .timeout_ms
                .map_or(defaults.timeout, |ms| Duration::from_millis(ms.max(1) as u64)),
            format: self.signature,
            headers: headers.to_map()?,
            tls,
            filter: filter.transpose().map_err(|e| stored(&e))?,
            cancelled: self.cancelled.clone(),
            secrets,
            stopped: AtomicBool::new(self.state != EndpointState::Active),
        })
    }
}

/// Loads endpoints by id, as of the connection's snapshot. Those of a tenant that is paused, or moving to another cell, are paused.
pub(crate) async fn load(
    connection: &mut PgConnection,
    ids: &[EndpointId],
) -> Result<Vec<EndpointRow>, sqlx::Error> {
    sqlx::query_as(
        "select e.id, e.tenant_id, e.public_id, t.slug as tenant_name, e.shard, e.state_reason, e.url,
                case when (t.paused_at is not null or not t.is_here) and e.state <> 'deleted' then 'paused' else e.state end as state,
                e.concurrency, e.rate_per_second, e.ordered,
                e.retry_schedule, e.timeout_ms, e.signature, e.headers, e.tls, e.filter,
                exists (select from postrider.endpoint_health h
                        where h.endpoint_id = e.id
                          and h.failing_since < clock_timestamp() - interval '1 minute') as was_failing,
                coalesce(s.secrets, '{}') as secrets, coalesce(s.retire, '{}') as retire,
                array(select distinct q.replay_id from postrider.queue q
                      join postrider.replays r on r.public_id = q.replay_id
                      where q.endpoint_id = e.id and q.replay_id is not null and q.was_source is not null
                        and r.state = 'cancelled' and e.state <> 'deleted') as cancelled
         from postrider.endpoints e
         join postrider.tenants t on t.id = e.tenant_id
         left join lateral (
             select array_agg(s.ciphertext order by s.id desc) as secrets,
                    array_agg(s.retires_at order by s.id desc) as retire
             from postrider.secrets s
             where s.endpoint_id = e.id and (s.retires_at is null or s.retires_at > clock_timestamp())
         ) s on true
         where e.id = any($1)",
    )
    .bind(ids)
    .fetch_all(connection)
    .await
}

#[cfg(test)]
mod simulated {
    use super::*;

    impl EndpointRow {
        /// Settings of a version, which is the path of its URL. `None`: unusable settings.
        pub(crate) fn for_simulation(id: EndpointId, shard: Shard, version: Option<u64>) -> Self {
            Self {
                id,
                tenant_id: TenantId(1),
                public_id: "ep_1".to_owned(),
                tenant_name: "acme".to_owned(),
                shard,
                state: EndpointState::Active,
                url: match version {
                    Some(version) => format!("http://example.com/{version}"),
                    None => "no URL".to_owned(),
                },
                state_reason: None,
                concurrency: None,
                rate_per_second: None,
                ordered: false,
                was_failing: false,
                retry_schedule: None,
                timeout_ms: None,
                signature: SignatureFormat::TV1,
                headers: None,
                tls: None,
                filter: None,
                secrets: Vec::new(),
                retire: Vec::new(),
                cancelled: Vec::new(),
            }
        }
    }

    impl Endpoint {
        pub(crate) fn for_simulation(concurrency: usize, ordered: bool, state: EndpointState) -> Self {
            Self {
                id: EndpointId(1),
                tenant: TenantId(1),
                public_id: "ep_1".into(),
                tenant_name: "acme".into(),
                shard: Shard(0),
                state,
                url: Url::parse("http://example.com/").expect("a URL"),
                concurrency,
                rate_per_second: None,
                ordered,
                disabled_reason: DeadReason::EndpointDisabled,
                was_failing: false,
                schedule: Schedule::default(),
                timeout: Duration::from_secs(10),
                format: SignatureFormat::TV1,
                headers: HeaderMap::new(),
                tls: None,
                filter: None,
                cancelled: Vec::new(),
                secrets: Vec::new(),
                stopped: AtomicBool::new(false),
            }
        }
    }
}
