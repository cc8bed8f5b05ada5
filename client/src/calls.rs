//! One method for every API operation.

use chrono::SecondsFormat;
use reqwest::Method;
use serde_json::json;

use crate::*;

impl Client {
    pub async fn tenants(&self, page: &PageOf) -> Result<Page<Tenant>, Error> {
        self.page(&["v1", "tenants"], page, &[]).await
    }

    /// Settings that are omitted are reset to their defaults.
    pub async fn put_tenant(&self, tenant: &str, settings: &TenantSettings) -> Result<Tenant, Error> {
        self.with_body(Method::PUT, &["v1", "tenants", tenant], settings)
            .await
    }

    pub async fn tenant(&self, tenant: &str) -> Result<Tenant, Error> {
        self.get(&["v1", "tenants", tenant], &[]).await
    }

    /// Returns once nothing more is sent for the tenant.
    pub async fn delete_tenant(&self, tenant: &str) -> Result<(), Error> {
        self.delete(&["v1", "tenants", tenant]).await
    }

    /// Returns once nothing more is sent to the tenant's endpoints.
    pub async fn pause_tenant(&self, tenant: &str, reason: Option<&str>) -> Result<Tenant, Error> {
        let pause = TenantPause {
            reason: reason.map(str::to_owned),
        };
        self.with_body(Method::PUT, &["v1", "tenants", tenant, "pause"], &pause)
            .await
    }

    pub async fn resume_tenant(&self, tenant: &str) -> Result<(), Error> {
        self.delete(&["v1", "tenants", tenant, "pause"]).await
    }

    /// Moves it to another cell, in the background.
    pub async fn move_tenant(&self, tenant: &str, to: &str) -> Result<Move, Error> {
        let (tenant, to) = (tenant.to_owned(), to.to_owned());
        self.with_body(Method::POST, &["v1", "moves"], &NewMove { tenant, to })
            .await
    }

    pub async fn moves(&self, page: &PageOf) -> Result<Page<Move>, Error> {
        self.page(&["v1", "moves"], page, &[]).await
    }

    pub async fn tenant_move(&self, id: &str) -> Result<Move, Error> {
        self.get(&["v1", "moves", id], &[]).await
    }

    /// Possible until the new cell has taken over.
    pub async fn cancel_move(&self, id: &str) -> Result<Move, Error> {
        self.with_body(Method::DELETE, &["v1", "moves", id], &()).await
    }

    pub async fn cells(&self) -> Result<Cells, Error> {
        self.get(&["v1", "cells"], &[]).await
    }

    /// Drains it, or opens it again.
    pub async fn put_cell(&self, cell: &str, settings: &CellSettings) -> Result<(), Error> {
        self.with_body(Method::PUT, &["v1", "cells", cell], settings)
            .await
    }

    pub async fn quotas(&self, tenant: &str) -> Result<Quotas, Error> {
        self.get(&["v1", "tenants", tenant, "quotas"], &[]).await
    }

    pub async fn put_quotas(&self, tenant: &str, settings: &QuotaSettings) -> Result<Quotas, Error> {
        self.with_body(Method::PUT, &["v1", "tenants", tenant, "quotas"], settings)
            .await
    }

    pub async fn sending(&self) -> Result<Sending, Error> {
        self.get(&["v1", "sending"], &[]).await
    }

    /// Returns once every dispatcher has applied it.
    pub async fn put_sending(&self, settings: &SendingSettings) -> Result<Sending, Error> {
        self.with_body(Method::PUT, &["v1", "sending"], settings).await
    }

    pub async fn log_filter(&self) -> Result<LogFilter, Error> {
        self.get(&["v1", "log-filter"], &[]).await
    }

    pub async fn put_log_filter(&self, filter: &LogFilter) -> Result<LogFilter, Error> {
        self.with_body(Method::PUT, &["v1", "log-filter"], filter).await
    }

    /// Without the schemas.
    pub async fn event_types(&self, page: &PageOf) -> Result<Page<EventType>, Error> {
        self.page(&["v1", "event-types"], page, &[]).await
    }

    pub async fn event_type(&self, name: &str) -> Result<EventType, Error> {
        self.get(&["v1", "event-types", name], &[]).await
    }

    pub async fn put_event_type(&self, name: &str, settings: &EventTypeSettings) -> Result<EventType, Error> {
        self.with_body(Method::PUT, &["v1", "event-types", name], settings)
            .await
    }

    pub async fn delete_event_type(&self, name: &str) -> Result<(), Error> {
        self.delete(&["v1", "event-types", name]).await
    }

    /// If an event with this id and the same content exists, it is returned and not sent again.
    pub async fn emit(&self, tenant: &str, event: &NewEvent) -> Result<Event, Error> {
        let body = event.form().map_err(|error| self.unreadable(error.to_string()))?;
        self.with_body(Method::POST, &["v1", "tenants", tenant, "events"], &body)
            .await
    }

    /// Newest first.
    pub async fn events(&self, tenant: &str, page: &PageOf) -> Result<Page<Event>, Error> {
        self.page(&["v1", "tenants", tenant, "events"], page, &[]).await
    }

    /// With its deliveries.
    pub async fn event(&self, tenant: &str, id: &str) -> Result<Event, Error> {
        self.get(&["v1", "tenants", tenant, "events", id], &[]).await
    }

    pub async fn create_endpoint(
        &self,
        tenant: &str,
        settings: &EndpointSettings,
    ) -> Result<Endpoint, Error> {
        self.with_body(Method::POST, &["v1", "tenants", tenant, "endpoints"], settings)
            .await
    }

    pub async fn endpoints(&self, tenant: &str, page: &PageOf) -> Result<Page<Endpoint>, Error> {
        self.page(&["v1", "tenants", tenant, "endpoints"], page, &[])
            .await
    }

    /// Endpoints of all tenants with their health. Needs an admin key.
    pub async fn endpoint_health(
        &self,
        filter: &HealthFilter,
        page: &PageOf,
    ) -> Result<Page<EndpointStatus>, Error> {
        let filter = [
            ("health", filter.health.map(|health| health.as_str().to_owned())),
            (
                "circuit",
                filter.circuit.map(|circuit| circuit.as_str().to_owned()),
            ),
            ("tenant", filter.tenant.clone()),
            ("sort", filter.most_failures_first.then(|| "failures".to_owned())),
        ];
        self.page(&["v1", "endpoints"], page, &filter).await
    }

    pub async fn endpoint(&self, tenant: &str, id: &str) -> Result<Endpoint, Error> {
        self.get(&["v1", "tenants", tenant, "endpoints", id], &[]).await
    }

    /// Returns once the change is in effect.
    pub async fn update_endpoint(
        &self,
        tenant: &str,
        id: &str,
        settings: &EndpointSettings,
    ) -> Result<Endpoint, Error> {
        self.with_body(
            Method::PATCH,
            &["v1", "tenants", tenant, "endpoints", id],
            settings,
        )
        .await
    }

    /// Returns once no more requests to it are started.
    pub async fn delete_endpoint(&self, tenant: &str, id: &str) -> Result<(), Error> {
        self.delete(&["v1", "tenants", tenant, "endpoints", id]).await
    }

    pub async fn secrets(&self, tenant: &str, endpoint: &str) -> Result<Secrets, Error> {
        self.get(&["v1", "tenants", tenant, "endpoints", endpoint, "secret"], &[])
            .await
    }

    pub async fn rotate_secret(
        &self,
        tenant: &str,
        endpoint: &str,
        rotation: &Rotation,
    ) -> Result<Secrets, Error> {
        let path = ["v1", "tenants", tenant, "endpoints", endpoint, "secret", "rotate"];
        self.with_body(Method::POST, &path, rotation).await
    }

    /// Sends one test event now.
    pub async fn test_endpoint(
        &self,
        tenant: &str,
        endpoint: &str,
        type_name: Option<&str>,
    ) -> Result<TestAttempt, Error> {
        let path = ["v1", "tenants", tenant, "endpoints", endpoint, "test"];
        self.with_body(Method::POST, &path, &json!({"type": type_name}))
            .await
    }

    /// Tests the receiver's implementation with a few dozen test events.
    pub async fn probe_endpoint(
        &self,
        tenant: &str,
        endpoint: &str,
        type_name: Option<&str>,
    ) -> Result<ProbeReport, Error> {
        let path = ["v1", "tenants", tenant, "endpoints", endpoint, "probe"];
        self.with_body(Method::POST, &path, &json!({"type": type_name}))
            .await
    }

    pub async fn deliveries(
        &self,
        tenant: &str,
        filter: &DeliveryFilter,
        page: &PageOf,
    ) -> Result<Page<Delivery>, Error> {
        let time = |time: chrono::DateTime<chrono::Utc>| time.to_rfc3339_opts(SecondsFormat::Millis, true);
        let filter = [
            ("state", filter.state.map(|state| state.as_str().to_owned())),
            ("endpoint", filter.endpoint.clone()),
            ("type", filter.type_name.clone()),
            ("event", filter.event.clone()),
            ("status_code", filter.status_code.map(|code| code.to_string())),
            ("since", filter.since.map(time)),
            ("until", filter.until.map(time)),
        ];
        self.page(&["v1", "tenants", tenant, "deliveries"], page, &filter)
            .await
    }

    pub async fn delivery(&self, tenant: &str, id: &str) -> Result<DeliveryWithAttempts, Error> {
        self.get(&["v1", "tenants", tenant, "deliveries", id], &[]).await
    }

    pub async fn replay_delivery(&self, tenant: &str, id: &str) -> Result<DeliveryWithAttempts, Error> {
        let path = ["v1", "tenants", tenant, "deliveries", id, "replay"];
        self.with_body(Method::POST, &path, &json!({})).await
    }

    /// Starts a durable job that replays many deliveries.
    pub async fn start_replay(&self, tenant: &str, replay: &NewReplay) -> Result<Replay, Error> {
        self.with_body(Method::POST, &["v1", "tenants", tenant, "replays"], replay)
            .await
    }

    /// Counts what the replay would send, and returns a sample.
    pub async fn preview_replay(&self, tenant: &str, replay: &NewReplay) -> Result<ReplayPreview, Error> {
        let replay = NewReplay {
            dry_run: true,
            ..replay.clone()
        };
        self.with_body(Method::POST, &["v1", "tenants", tenant, "replays"], &replay)
            .await
    }

    pub async fn replay(&self, tenant: &str, id: &str) -> Result<Replay, Error> {
        self.get(&["v1", "tenants", tenant, "replays", id], &[]).await
    }

    pub async fn cancel_replay(&self, tenant: &str, id: &str) -> Result<(), Error> {
        self.delete(&["v1", "tenants", tenant, "replays", id]).await
    }

    pub async fn create_listener(&self, tenant: &str, listener: &NewListener) -> Result<Listener, Error> {
        self.with_body(Method::POST, &["v1", "tenants", tenant, "listeners"], listener)
            .await
    }

    pub async fn delete_listener(&self, tenant: &str, id: &str) -> Result<(), Error> {
        self.delete(&["v1", "tenants", tenant, "listeners", id]).await
    }

    /// The key itself is returned only here.
    pub async fn create_api_key(&self, key: &NewApiKey) -> Result<ApiKey, Error> {
        self.with_body(Method::POST, &["v1", "api-keys"], key).await
    }

    pub async fn api_keys(&self, page: &PageOf) -> Result<Page<ApiKey>, Error> {
        self.page(&["v1", "api-keys"], page, &[]).await
    }

    pub async fn revoke_api_key(&self, id: &str) -> Result<(), Error> {
        self.delete(&["v1", "api-keys", id]).await
    }

    /// The audit log, newest first.
    pub async fn audit(&self, page: &PageOf) -> Result<Page<AuditEntry>, Error> {
        self.page(&["v1", "audit"], page, &[]).await
    }
}
