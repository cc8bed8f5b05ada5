//! The dead letters page: groups that can be selected for a bulk replay, and a list of individual dead letters.

use std::cmp::Reverse;

use askama::Template;
use askama_web::WebTemplate;
use postrider_proto::{DeadReason, DeliveryState, EndpointState, Failure};
use serde::Deserialize;

use super::{DeliverySummary, Frame, Moment, Paged, replay_preview::GROUPS_MAX};
use crate::{
    actions::failures::label,
    auth::Visit,
    http::{
        cells::{ask, merge},
        input::Query,
        pagination,
        problem::Problem,
    },
    tables::{
        dead_letters::{self, Group, GroupFilter},
        deliveries::{self, Delivery, Filter},
        endpoints, tenants,
    },
};

const LINES: i64 = 15;
const DONE: [(&str, &str); 2] = [
    ("discarded", "Dead letters discarded."),
    (
        "discarded-partly",
        "The oldest 5,000 dead letters were discarded. Select the group again to discard the rest.",
    ),
];
/// The largest groups are listed, as many as can be selected; the others can be found by endpoint.
const GROUPS: i64 = GROUPS_MAX as i64;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct DeadLettersQuery {
    cursor: Option<String>,
    tenant: String,
    endpoint: String,
    done: String,
}

struct DeadLine {
    line: DeliverySummary,
    reason: &'static str,
    failed_at: Moment,
}

#[derive(Template, WebTemplate)]
#[template(path = "dead_letters.html")]
pub(crate) struct DeadLettersPage {
    frame: Frame,
    tenant: String,
    endpoint: String,
    total: i64,
    groups: Vec<Group>,
    has_more_groups: bool,
    lines: Vec<DeadLine>,
    next: Option<String>,
    /// Groups that were selected for a preview that can't be shown, and why.
    selected: Vec<String>,
    error: Option<String>,
}

impl DeadLettersPage {
    fn reason(&self, group: &Group) -> String {
        cause_label(Some(group.reason), Some(group.failure))
    }

    /// The value of the group's checkbox.
    fn key(&self, group: &Group) -> String {
        format!(
            "{}~{}~{}~{}",
            group.endpoint, group.event_type, group.reason, group.failure
        )
    }

    fn is_selected(&self, group: &Group) -> bool {
        self.selected.contains(&self.key(group))
    }

    fn can_replay(&self, group: &Group) -> bool {
        matches!(
            group.endpoint_state,
            EndpointState::Active | EndpointState::Paused
        )
    }
}

pub(crate) async fn show(visit: Visit, Query(query): Query<DeadLettersQuery>) -> Paged<DeadLettersPage> {
    Ok(load(visit, query).await?)
}

/// The page with the selection that can't be previewed.
pub(super) async fn rejected(
    visit: Visit,
    selected: Vec<String>,
    error: String,
) -> Result<DeadLettersPage, Problem> {
    let page = load(visit, DeadLettersQuery::default()).await?;
    Ok(DeadLettersPage {
        selected,
        error: Some(error),
        ..page
    })
}

async fn load(visit: Visit, query: DeadLettersQuery) -> Result<DeadLettersPage, Problem> {
    let after = pagination::after(query.cursor.as_deref())?;
    let (scope, is_known) = match (visit.session.scope(), query.tenant.as_str()) {
        (None, "") => (None, true),
        (Some(own), _) => (Some(own), true),
        (None, slug) => {
            let found = tenants::find(&visit.app.pool, slug).await?.map(|row| row.id);
            (found, found.is_some())
        }
    };
    let endpoint = match query.endpoint.as_str() {
        "" => None,
        public_id => Some(endpoints::find_number(&visit.app.pool, scope, public_id).await?),
    };
    let filter = Filter {
        tenant: scope,
        endpoint: endpoint.flatten(),
        state: Some(DeliveryState::Dead),
        ..Filter::default()
    };
    let grouped = GroupFilter {
        tenant: scope,
        endpoint: filter.endpoint,
        ..GroupFilter::default()
    };
    let mut silent = Vec::new();
    let (total, mut groups, (found, next)) = if endpoint == Some(None) || !is_known {
        (0, Vec::new(), (Vec::new(), None))
    } else {
        let answers = ask(&visit.app, move |app| {
            let (filter, grouped) = (filter.clone(), grouped.clone());
            async move {
                let total = dead_letters::total(&app.pool, filter.tenant, filter.endpoint).await?;
                let groups = dead_letters::groups(&app.pool, &grouped, GROUPS + 1).await?;
                Ok((
                    total,
                    groups,
                    deliveries::list(&app.pool, &filter, after, LINES).await?,
                ))
            }
        })
        .await?;
        silent.clone_from(&answers.silent);
        let (mut total, mut groups, mut lists) = (0, Vec::new(), Vec::new());
        for (more, some, list) in answers.parts() {
            total += more;
            groups.extend(some);
            lists.push(list);
        }
        groups.sort_by_key(|group: &Group| Reverse(group.count));
        (total, groups, merge(lists, LINES, Delivery::id))
    };
    let has_more_groups = groups.len() as i64 > GROUPS;
    groups.truncate(GROUPS as usize);
    Ok(DeadLettersPage {
        frame: Frame::new(visit.session, "dead-letters")
            .with_done(&query.done, &DONE)
            .without(&silent),
        tenant: query.tenant,
        endpoint: query.endpoint,
        total,
        groups,
        has_more_groups,
        lines: found
            .iter()
            .map(|delivery| DeadLine {
                line: DeliverySummary::from(delivery),
                reason: delivery.reason.map_or("Unknown reason", reason_label),
                failed_at: Moment(delivery.died_at),
            })
            .collect(),
        next: next.map(|id| pagination::encode(&id)),
        selected: Vec::new(),
        error: None,
    })
}

/// What failed. Of dead letters whose attempts all failed, that is what the last one failed with.
pub(super) fn cause_label(reason: Option<DeadReason>, failure: Option<Failure>) -> String {
    match (reason, failure) {
        (None | Some(DeadReason::Exhausted), Some(failure)) => label(failure),
        (None, None) => "Unknown reason".to_owned(),
        (Some(reason), _) => reason_label(reason).to_owned(),
    }
}

pub(super) const fn reason_label(reason: DeadReason) -> &'static str {
    match reason {
        DeadReason::Exhausted => "All attempts failed",
        DeadReason::Gone => "The endpoint responded with 410 Gone",
        DeadReason::EndpointDisabled => "The endpoint is disabled",
        DeadReason::TooOld => "Queued for too long",
        DeadReason::RefusedAddress => "The address is not allowed",
    }
}
