//! The search box: ids of events, deliveries, endpoints and tenants; URLs and descriptions of endpoints; names of tenants.
//! Invariant: in a tenant's scope nothing of another tenant is found, and no list of results is longer than `HITS_MAX`.

use postrider_proto::{DeliveryId, TenantId, limits::URL_BYTES_MAX};

use crate::{
    Pool, Shared,
    http::{
        cells::ask,
        input::is_plain_text,
        problem::{Faults, Problem},
    },
    tables::{
        deliveries::{self, Delivery},
        endpoints::{self, EndpointRow, ListedRow},
        event_list::{self, EventSummary},
        events::{self, Effort, TENANTS_PROBED_TYPING_MAX},
        search, tenants,
    },
};

/// A URL of any length can be looked for.
pub(crate) const TEXT_BYTES_MAX: usize = URL_BYTES_MAX;
/// Results of one kind.
pub(crate) const HITS_MAX: usize = 10;
const TENANTS_SUGGESTED_MAX: i64 = 20;

#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) events: Vec<EventSummary>,
    pub(crate) delivery: Option<Delivery>,
    /// The one with exactly this id.
    pub(crate) endpoint: Option<EndpointRow>,
    pub(crate) endpoints: Vec<ListedRow>,
    pub(crate) tenants: Vec<search::TenantHit>,
    /// More endpoints or tenants match than are listed.
    pub(crate) has_more: bool,
    /// There are so many endpoints or tenants that not all were searched.
    pub(crate) is_partial: bool,
    /// Event ids were not looked up in all tenants: that waits for the Enter key.
    pub(crate) is_waiting_for_enter: bool,
    /// The page of the only result, if an id was searched for.
    pub(crate) exact: Option<String>,
}

impl Found {
    pub(crate) fn count(&self) -> usize {
        self.events.len()
            + usize::from(self.delivery.is_some())
            + usize::from(self.endpoint.is_some())
            + self.endpoints.len()
            + self.tenants.len()
    }

    /// Of home and a cell. Home has the tenants.
    fn and(mut self, other: Self) -> Self {
        self.has_more |= other.has_more;
        self.is_partial |= other.is_partial;
        self.events.extend(other.events);
        self.events.sort_by_key(|event| std::cmp::Reverse(event.id));
        self.events.dedup_by_key(|event| event.id);
        self.endpoints.extend(other.endpoints);
        self.has_more |= self.events.len() > HITS_MAX || self.endpoints.len() > HITS_MAX;
        self.events.truncate(HITS_MAX);
        self.endpoints.truncate(HITS_MAX);
        self.delivery = self.delivery.or(other.delivery);
        self.endpoint = self.endpoint.or(other.endpoint);
        self.is_waiting_for_enter |= other.is_waiting_for_enter;
        self.is_waiting_for_enter &= self.events.is_empty();
        if self.tenants.is_empty() {
            self.tenants = other.tenants;
        }
        self
    }
}

fn read(text: &str) -> Result<&str, Problem> {
    let text = text.trim();
    if !is_plain_text(text, TEXT_BYTES_MAX) {
        let mut faults = Faults::default();
        faults.add(
            "q",
            format!("must be plain text of at most {TEXT_BYTES_MAX} bytes"),
        );
        faults.done()?;
    }
    Ok(text)
}

/// For an input that asks for a tenant. Without a text the first ones.
pub(crate) async fn suggest_tenants(pool: &Pool, text: &str) -> Result<Vec<search::TenantHit>, Problem> {
    Ok(search::tenants(pool, read(text)?, TENANTS_SUGGESTED_MAX).await?)
}

/// `scope` is the tenant of a customer; the team searches all. Also returns the cells that did not respond.
pub(crate) async fn find_everywhere(
    app: &Shared,
    scope: Option<TenantId>,
    text: &str,
    effort: Effort,
) -> Result<(Found, Vec<String>), Problem> {
    let asked = text.to_owned();
    let answers = ask(app, move |app| {
        let text = asked.clone();
        async move { find(&app.pool, scope, &text, effort).await }
    })
    .await?;
    let silent = answers.silent.clone();
    let mut found = answers.parts().into_iter().reduce(Found::and).unwrap_or_default();
    found.exact = exact(&found, text.trim());
    Ok((found, silent))
}

async fn find(pool: &Pool, scope: Option<TenantId>, text: &str, effort: Effort) -> Result<Found, Problem> {
    let text = read(text)?;
    if text.is_empty() {
        return Ok(Found::default());
    }
    let mut found = Found::default();
    if let Ok(id) = text.parse::<DeliveryId>() {
        found.delivery = deliveries::find(pool, scope, id).await?;
    }
    found.endpoint = endpoints::find_in(pool, scope, text).await?;
    let mut events = events::find_in(pool, scope, text, effort).await?;
    events.sort_unstable_by(|a, b| b.cmp(a));
    found.has_more = events.len() > HITS_MAX;
    events.truncate(HITS_MAX);
    found.events = event_list::summaries(pool, &events).await?;
    found.endpoints = search::endpoints(pool, scope, text, HITS_MAX as i64 + 1).await?;
    if scope.is_none() {
        found.tenants = search::tenants(pool, text, HITS_MAX as i64 + 1).await?;
        // One with this id may be beyond those that were searched.
        if let Some(row) = tenants::find(pool, text).await?
            && !found.tenants.iter().any(|hit| hit.slug == row.slug)
        {
            let (slug, name) = (row.slug, row.name);
            found.tenants.insert(0, search::TenantHit { slug, name });
        }
        found.is_partial = search::is_partial(pool).await?;
        found.is_waiting_for_enter = effort == Effort::Typing
            && found.events.is_empty()
            && events::is_public_id(text)
            && search::has_more_tenants(pool, TENANTS_PROBED_TYPING_MAX).await?;
    }
    found.has_more |= found.endpoints.len() > HITS_MAX || found.tenants.len() > HITS_MAX;
    found.endpoints.truncate(HITS_MAX);
    found.tenants.truncate(HITS_MAX);
    Ok(found)
}

fn exact(found: &Found, text: &str) -> Option<String> {
    if found.count() != 1 {
        return None;
    }
    let tenant = found.tenants.iter().find(|tenant| tenant.slug == text);
    let delivery = found.delivery.as_ref();
    let event = found.events.first();
    let pages = [
        event.map(|event| format!("/events/{}", event.id.generated())),
        delivery.map(|delivery| format!("/deliveries/{}", delivery.id())),
        found
            .endpoint
            .as_ref()
            .map(|endpoint| format!("/endpoints/{}", endpoint.public_id)),
        tenant.map(|tenant| format!("/tenants/{}", tenant.slug)),
    ];
    pages.into_iter().flatten().next()
}
