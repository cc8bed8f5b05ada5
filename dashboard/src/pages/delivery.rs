//! The page of a delivery: a timeline of its attempts with requests and responses, and the replay button.

use std::time::Duration;

use askama::Template;
use askama_web::WebTemplate;
use axum::{Extension, extract::Path, response::Redirect};
use chrono::{DateTime, SecondsFormat, Utc};
use postrider_dispatcher::statistics::Class;
use postrider_proto::{
    DeadReason, DeliveryId, DeliveryState, Failure, OutcomeKind, TenantId, api::Attempt,
    limits::RESPONSE_KEPT_BYTES_MAX,
};

use super::{DeliverySummary, Done, Frame, Markup, Moment, Paged, ShownBody, dead_letters::reason_label};
use crate::{
    Shared,
    actions::{
        attempt_view::{self, Shown, attempts_of},
        delivery_filter::failure_word,
        discards,
        failures::{advice, concerns_signature},
        replay::{Asked, Replayed},
    },
    auth::{Actor, Arrived, Confirmed, Session, Visit},
    http::{cells::Here, input::Query, problem::Problem},
    pages::{
        curl,
        live::{Content, Live, Stream},
        stats_format::format_exact_ms,
    },
    tables::{
        self,
        deliveries::{self, Delivery, time_of},
        events,
        failures::{self, Failed, Sample},
        neighbours::{self, Neighbours},
    },
};

const REFRESH: Duration = Duration::from_secs(1);
const DONE: [(&str, &str); 6] = [
    ("discarded", "Dead letter discarded."),
    (
        "not-discarded",
        "Nothing was discarded: the delivery is not dead or was attempted in the meantime.",
    ),
    (
        "queued",
        "Queued: it will be sent as soon as the endpoint has capacity.",
    ),
    (
        "on-hold",
        "Queued: it is on hold until sending to the endpoint is resumed.",
    ),
    ("already-queued", "Nothing changed: it was already queued."),
    (
        "attempted",
        "Nothing was queued: it was attempted in the meantime. See the latest attempt.",
    ),
];

#[derive(Template, WebTemplate)]
#[template(path = "delivery.html")]
pub(crate) struct DeliveryPage {
    frame: Frame,
    line: DeliverySummary,
    /// The event's generated ID, which its page is found by.
    event_number: String,
    version: String,
    actions: Markup,
    now: Markup,
    is_signed: bool,
    neighbours: Neighbours,
    body: ShownBody,
    curl: String,
    curl_hides: bool,
}

/// The buttons: a live part like the attempts, because what they do depends on the latest attempt shown.
#[derive(Template)]
#[template(path = "delivery_actions.html")]
struct Actions<'a> {
    frame: &'a Frame,
    line: &'a DeliverySummary,
    is_pending: bool,
}

/// The attempts, a live part. Those of a finished delivery change too: somebody may replay it.
#[derive(Template)]
#[template(path = "delivery_now.html")]
struct Now {
    line: DeliverySummary,
    reason: Option<String>,
    due: Moment,
    is_pending: bool,
    attempts: Vec<Attempt>,
    help: Option<Help>,
}

/// What to do about the latest failure, and how many deliveries of the endpoint failed the same way.
struct Help {
    advice: Option<&'static str>,
    concerns_signature: bool,
    others: usize,
    /// There are more.
    is_cut: bool,
    since: Moment,
    /// The address of a list of them.
    list: String,
}

impl Help {
    fn of(delivery: &Delivery, sample: &Sample) -> Option<Self> {
        let failure = Failure::new(delivery.status, delivery.outcome?);
        let alike = sample
            .failed
            .iter()
            .filter(|one| one.failure == failure && one.event != delivery.id().event);
        let alike: Vec<&Failed> = alike.collect();
        let advice = advice(failure);
        if advice.is_none() && alike.is_empty() {
            return None;
        }
        let events = alike.iter().map(|one| one.event);
        let oldest = events.chain([delivery.id().event]).min();
        Some(Self {
            advice,
            concerns_signature: concerns_signature(failure),
            others: alike.len(),
            is_cut: sample.is_cut,
            since: Moment(alike.iter().map(|one| one.at).min()),
            list: Self::list(delivery, failure, oldest.and_then(time_of)),
        })
    }

    /// The address of those that were counted, with the delivery itself. Unusual status codes are counted together.
    fn list(delivery: &Delivery, failure: Failure, since: Option<DateTime<Utc>>) -> String {
        let kind = OutcomeKind::from_number(delivery.outcome.unwrap_or_default());
        let status = delivery.status.and_then(|status| u16::try_from(status).ok());
        let class = kind.map(|kind| Class::of(kind, status));
        let word = class.map_or("any", failure_word);
        let mut list = format!("/deliveries?endpoint={}&failure={word}", delivery.endpoint);
        if failure.status().is_some() && failure.status() == delivery.status {
            list.extend(delivery.status.map(|status| format!("&status_code={status}")));
        }
        let since = since.map(|since| since.to_rfc3339_opts(SecondsFormat::Millis, true));
        list.extend(since.map(|since| format!("&since={since}")));
        list
    }
}

impl Now {
    fn moment(&self, attempt: &Attempt) -> Moment {
        Moment(Some(attempt.started_at))
    }

    /// `Total 297 ms · address 203.0.113.7:443 · DNS 12 ms · connect 30 ms · TLS 45 ms · first byte 210 ms`.
    fn phases(&self, attempt: &Attempt) -> String {
        let total = format!("Total {}", format_exact_ms(attempt.duration_ms));
        let Some(timing) = &attempt.timing else {
            return match attempt.has_failed() {
                true => total,
                false => format!("{total} · address and phases are recorded for failed attempts only"),
            };
        };
        let address = timing.address.iter().map(|address| format!("address {address}"));
        let phases = [
            ("DNS", timing.dns_ms),
            ("connect", timing.connect_ms),
            ("TLS", timing.tls_ms),
            ("first byte", timing.first_byte_ms),
        ];
        let phases = phases
            .into_iter()
            .filter_map(|(name, ms)| ms.map(|ms| format!("{name} {ms} ms")));
        let parts = [total].into_iter().chain(address).chain(phases);
        parts.collect::<Vec<_>>().join(" · ")
    }

    /// What is stored of a long response body.
    fn kept_kib(&self) -> usize {
        RESPONSE_KEPT_BYTES_MAX / 1024
    }

    fn actions<'a>(&'a self, frame: &'a Frame) -> Actions<'a> {
        Actions {
            frame,
            line: &self.line,
            is_pending: self.is_pending,
        }
    }
}

/// Why a delivery failed. A delivery that was replayed after a success has attempts that did not fail.
fn failure_reason(reason: DeadReason, attempts: &[Attempt]) -> String {
    match (reason, attempts.len()) {
        (DeadReason::Exhausted, 1) => "The only attempt failed".to_owned(),
        (DeadReason::Exhausted, 2) if attempts.iter().all(Attempt::has_failed) => {
            "Both attempts failed".to_owned()
        }
        (DeadReason::Exhausted, count) if count > 2 && attempts.iter().all(Attempt::has_failed) => {
            format!("All {count} attempts failed")
        }
        _ => reason_label(reason).to_owned(),
    }
}

fn parse_id(text: &str) -> Result<DeliveryId, Problem> {
    text.parse().map_err(|_| Problem::not_found("delivery"))
}

async fn load(app: &Shared, scope: Option<TenantId>, id: DeliveryId) -> Result<(Delivery, Now), Problem> {
    let delivery = deliveries::find(&app.pool, scope, id)
        .await?
        .ok_or_else(|| Problem::not_found("delivery"))?;
    let attempts = attempts_of(app, &mut *app.pool.acquire().await?, &delivery).await?;
    let has_failed = delivery.state() != DeliveryState::Delivered
        && attempts.first().is_some_and(|attempt| attempt.has_failed());
    let help = match has_failed {
        true => Help::of(&delivery, &failures::sample(&app.pool, id.endpoint).await?),
        false => None,
    };
    let now = Now {
        help,
        line: DeliverySummary::from(&delivery),
        reason: delivery.reason.map(|reason| failure_reason(reason, &attempts)),
        due: Moment(delivery.due_at),
        is_pending: delivery.state() == DeliveryState::Pending,
        attempts,
    };
    Ok((delivery, now))
}

pub(crate) async fn show(
    visit: Visit,
    Path(id): Path<String>,
    Query(query): Query<Done>,
) -> Paged<DeliveryPage> {
    let id = parse_id(&id)?;
    let (delivery, now) = load(&visit.app, visit.session.scope(), id).await?;
    let (body, version) = events::load(&visit.app.pool, delivery.tenant_id, &[id.event])
        .await?
        .pop()
        .map(|event| (event.body, event.version))
        .unwrap_or_default();
    let raw = String::from_utf8_lossy(&body).into_owned();
    let curl = curl::command(&delivery.url, now.attempts.first(), &raw);
    let frame = Frame::new(visit.session, "deliveries").with_done(&query.done, &DONE);
    Ok(DeliveryPage {
        actions: Markup::of(&now.actions(&frame))?,
        frame,
        line: now.line.clone(),
        event_number: id.event.generated(),
        version,
        now: Markup::of(&now)?,
        is_signed: now.attempts.iter().any(|one| !one.request_headers.is_empty()),
        neighbours: neighbours::of(&visit.app.pool, id).await.map_err(Problem::from)?,
        body: ShownBody::of(id.event, &raw),
        curl_hides: curl.contains(attempt_view::HIDDEN),
        curl,
    })
}

pub(crate) async fn follow(
    visit: Visit,
    Extension(live): Extension<Live>,
    Path(id): Path<String>,
) -> Result<Stream, Problem> {
    let (id, scope) = (parse_id(&id)?, visit.session.scope());
    load(&visit.app, scope, id).await?;
    let frame = Frame::new(visit.session.clone(), "deliveries");
    live.stream(&visit.app.home.clone(), visit.session, REFRESH, move || {
        let (app, frame) = (visit.app.clone(), frame.clone());
        async move {
            let (_, now) = load(&app, scope, id).await?;
            let html = Markup::of(&now.actions(&frame))?.0 + &Markup::of(&now)?.0;
            Ok(match now.is_pending {
                true => Content::Html(html),
                false => Content::Settled(html),
            })
        }
    })
}

pub(crate) async fn discard(
    visit: Visit,
    Path(id): Path<String>,
    Confirmed { seen }: Confirmed,
) -> Paged<Redirect> {
    let id = parse_id(&id)?;
    let scope = visit.session.scope();
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let discarded = discards::discard_one(&mut transaction, &visit.actor, scope, id, seen).await?;
    transaction.commit().await.map_err(Problem::from)?;
    let is_shown = deliveries::find(&visit.app.pool, scope, id).await?.is_some();
    Ok(match (discarded, is_shown) {
        (Some(_), true) => Redirect::to(&format!("/deliveries/{id}?done=discarded")),
        (None, _) => Redirect::to(&format!("/deliveries/{id}?done=not-discarded")),
        // Its attempts have expired: nothing of it is left.
        (Some(_), false) => Redirect::to("/dead-letters?done=discarded"),
    })
}

pub(crate) async fn replay(
    Here { app, .. }: Here,
    Extension(session): Extension<Session>,
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
    Extension(arrived): Extension<Arrived>,
    Confirmed { seen }: Confirmed,
) -> Paged<Redirect> {
    let id = parse_id(&id)?;
    let mut transaction = tables::begin(&app.pool).await?;
    let asked = Asked { arrived, seen };
    let replayed =
        crate::actions::replay::replay(&mut transaction, &actor, session.scope(), id, asked).await?;
    transaction.commit().await?;
    app.wake.now();
    let done = match replayed {
        Replayed::Queued => "queued",
        Replayed::OnHold => "on-hold",
        Replayed::AlreadyQueued => "already-queued",
        Replayed::Attempted => "attempted",
    };
    Ok(Redirect::to(&format!("/deliveries/{id}?done={done}")))
}
