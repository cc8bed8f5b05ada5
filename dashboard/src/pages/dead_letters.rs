//! Dead letters of all tenants, each with its reason and a button to replay it.

use askama::Template;
use askama_web::WebTemplate;
use axum::{Extension, extract::State};
use postrider_proto::{DeadReason, DeliveryState};
use serde::Deserialize;

use super::{Frame, Line, Moment, PageProblem};
use crate::{
    Shared,
    auth::Session,
    deliveries::{self, Filter},
    input::Query,
    listing,
};

const LINES: i64 = 50;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct DeadLettersQuery {
    cursor: Option<String>,
}

struct DeadLine {
    line: Line,
    reason: &'static str,
    died: Moment,
}

#[derive(Template, WebTemplate)]
#[template(path = "dead_letters.html")]
pub(crate) struct DeadLettersPage {
    frame: Frame,
    lines: Vec<DeadLine>,
    next: Option<String>,
}

pub(crate) async fn show(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Query(query): Query<DeadLettersQuery>,
) -> Result<DeadLettersPage, PageProblem> {
    let after = query.cursor.as_deref().map(listing::decode).transpose()?;
    let filter = Filter {
        tenant: session.scope(),
        state: Some(DeliveryState::Dead),
        ..Filter::default()
    };
    let (found, next) = deliveries::list(&app.pool, &filter, after, LINES).await?;
    Ok(DeadLettersPage {
        frame: Frame::new(session, "dead-letters"),
        lines: found
            .iter()
            .map(|delivery| DeadLine {
                line: Line::from(delivery),
                reason: delivery.reason.map_or("unknown", in_words),
                died: Moment(delivery.died_at),
            })
            .collect(),
        next: next.map(|id| listing::encode(&id)),
    })
}

pub(super) const fn in_words(reason: DeadReason) -> &'static str {
    match reason {
        DeadReason::Exhausted => "exhausted: every attempt of the schedule failed",
        DeadReason::Gone => "the endpoint answered 410 Gone",
        DeadReason::EndpointDisabled => "the endpoint is disabled",
        DeadReason::TooOld => "it waited too long",
        DeadReason::RefusedAddress => "the address is not one that may be called",
    }
}
