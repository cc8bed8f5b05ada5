//! Discards dead letters: someone has decided that they need not be delivered. A discarded delivery keeps its attempts, can be
//! replayed on its own, and expires with its event. Who discarded it is in the audit log.

use postrider_dispatcher::store::transitions::{self, DiscardBounds};
use postrider_proto::{
    DeliveryId, DeliveryState, EventId, TenantId,
    api::{Discarded, NewDiscard, NewReplay},
};
use serde_json::json;
use sqlx::PgConnection;

use super::replays;
use crate::{
    App,
    actions::tenants::lock_here,
    auth::Actor,
    http::problem::{Faults, Kind, Problem, excerpt},
    tables::{
        self,
        audit::{self, Action, Entry},
        dead_letters::{self, Group, GroupFilter},
        deliveries::{self, Delivery, first_id_of},
        endpoints::{self, EndpointRow},
    },
};

/// Groups that one request can be about: those of an endpoint with one type.
const GROUPS_COUNTED_MAX: i64 = 10_000;

/// A validated request.
pub(crate) struct WantedDiscard {
    pub(crate) endpoint: EndpointRow,
    pub(crate) bounds: DiscardBounds,
    form: NewDiscard,
}

/// Reports all errors, not only the first one.
pub(crate) async fn read(app: &App, tenant: TenantId, form: NewDiscard) -> Result<WantedDiscard, Problem> {
    let mut faults = Faults::default();
    let filter = NewReplay {
        state: Some(DeliveryState::Dead.as_str().to_owned()),
        r#type: form.r#type.clone(),
        reason: form.reason.clone(),
        failure: form.failure.clone(),
        since: form.since.clone(),
        until: form.until.clone(),
        ..NewReplay::default()
    };
    let ask = replays::read_filter_and_type(app, tenant, &filter, &mut faults)
        .await?
        .ask;
    let public_id = form.endpoint.as_deref();
    let endpoint = match public_id {
        Some(public_id) => endpoints::find(&app.pool, tenant, public_id).await?,
        None => None,
    };
    match (public_id, &endpoint) {
        (None, _) => faults.add("endpoint", "is required"),
        (Some(id), None) => faults.add("endpoint", format!("endpoint `{}` does not exist", excerpt(id))),
        (Some(_), Some(_)) => {}
    }
    faults.done()?;
    let endpoint = endpoint.ok_or_else(|| Problem::not_found("endpoint"))?;
    let bounds = DiscardBounds {
        from: ask.since.map_or(EventId::LOWEST, first_id_of),
        upto: ask
            .until
            .map_or(EventId(uuid::Uuid::max()), |until| first_id_of(until).pred()),
        died_by: None,
        type_id: ask.type_id,
        reason: ask.reason,
        failure: ask.failure,
    };
    Ok(WantedDiscard {
        endpoint,
        bounds,
        form,
    })
}

/// How many dead letters a request is about.
pub(crate) async fn count(app: &App, wanted: &WantedDiscard) -> Result<i64, Problem> {
    let DiscardBounds {
        from,
        upto,
        type_id,
        reason,
        failure,
        ..
    } = wanted.bounds;
    let filter = GroupFilter {
        tenant: Some(wanted.endpoint.tenant_id),
        endpoint: Some(wanted.endpoint.id),
        types: type_id.map(|id| vec![id.0]),
        reason,
        failure,
        after: None,
    };
    let groups = match wanted.form.since.is_some() || wanted.form.until.is_some() {
        false => dead_letters::groups(&app.pool, &filter, GROUPS_COUNTED_MAX).await?,
        true => count_within(app, &filter, (from, upto), GROUPS_COUNTED_MAX).await?,
    };
    Ok(groups.iter().map(|group| group.count).sum())
}

/// Groups of dead letters of a time range, counted one by one.
pub(crate) async fn count_within(
    app: &App,
    filter: &GroupFilter,
    (from, upto): (EventId, EventId),
    limit: i64,
) -> Result<Vec<Group>, Problem> {
    // A transaction for its statement timeout: there may be millions of rows.
    let mut transaction = tables::begin(&app.pool).await?;
    let counted = dead_letters::groups_within(&mut *transaction, filter, from, upto, limit).await;
    counted.map_err(|error| {
        or_timeout(
            error,
            "Counting took too long. Narrow the range with `since` and `until`.",
        )
    })
}

/// Discards up to `limit` dead letters of the request, with its audit entry, in the caller's transaction.
pub(crate) async fn discard(
    connection: &mut PgConnection,
    actor: &Actor,
    wanted: &WantedDiscard,
    limit: i64,
) -> Result<Discarded, Problem> {
    let WantedDiscard {
        endpoint,
        bounds,
        form,
    } = wanted;
    lock_here(connection, endpoint.tenant_id).await?;
    let discarded = transitions::discard_batch(&mut *connection, endpoint.id, bounds, limit).await;
    let (discarded, is_complete) = discarded.map_err(|error| {
        or_timeout(
            error,
            "Finding these dead letters took too long. Narrow them by time.",
        )
    })?;
    if discarded > 0 {
        let detail = json!({
            "count": discarded, "type": form.r#type, "reason": form.reason, "failure": form.failure,
            "since": form.since, "until": form.until,
        });
        let (tenant, subject) = (Some(endpoint.tenant_id), &endpoint.public_id);
        let entry = Entry::new(actor, Action::DeadLettersDiscarded, tenant, subject).with(detail);
        audit::write(connection, entry).await?;
    }
    Ok(Discarded {
        discarded,
        is_complete,
    })
}

/// Discards one dead letter if its latest attempt is the one that the caller has seen. None if nothing changed, because the
/// delivery is not dead or was attempted since.
pub(crate) async fn discard_one(
    connection: &mut PgConnection,
    actor: &Actor,
    tenant: Option<TenantId>,
    id: DeliveryId,
    seen: Option<i16>,
) -> Result<Option<Delivery>, Problem> {
    let delivery = deliveries::find(&mut *connection, tenant, id)
        .await?
        .ok_or_else(|| Problem::not_found("delivery"))?;
    lock_here(connection, delivery.tenant_id).await?;
    let seen = seen.unwrap_or(delivery.attempt_count);
    if !transitions::discard_one(&mut *connection, id, seen).await? {
        return Ok(None);
    }
    let subject = id.to_string();
    let detail = json!({
        "event": delivery.event(), "endpoint": delivery.endpoint, "reason": delivery.reason,
    });
    let entry = Entry::new(
        actor,
        Action::DeliveryDiscarded,
        Some(delivery.tenant_id),
        &subject,
    );
    audit::write(connection, entry.with(detail)).await?;
    Ok(Some(delivery))
}

fn or_timeout(error: sqlx::Error, detail: &str) -> Problem {
    let is_timeout = error.as_database_error().and_then(|e| e.code()).as_deref() == Some("57014");
    match is_timeout {
        true => Problem::new(Kind::CountTimeout, detail),
        false => error.into(),
    }
}
