//! One delivery: its attempts in words, what was sent, and the button to replay it.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::{Path, State},
    response::Redirect,
};
use postrider_proto::DeliveryId;

use super::{DoneQuery, Frame, Line, Moment, PageProblem, dead_letters::in_words};
use crate::{
    Shared,
    api::deliveries::attempts_of,
    auth::{Actor, Arrived, Confirmed, Session},
    deliveries,
    input::Query,
    problem::Problem,
    replay::Asked,
    tables::{self, events},
    transcript::Attempt,
};

const DONE: [(&str, &str); 1] = [(
    "replayed",
    "It is back in line and goes out as soon as the endpoint has room.",
)];

#[derive(Template, WebTemplate)]
#[template(path = "delivery.html")]
pub(crate) struct DeliveryPage {
    frame: Frame,
    line: Line,
    reason: Option<&'static str>,
    next_attempt: Moment,
    attempts: Vec<Attempt>,
    body: String,
}

impl DeliveryPage {
    fn moment(&self, attempt: &Attempt) -> Moment {
        Moment(Some(attempt.started_at))
    }
}

fn parse_id(text: &str) -> Result<DeliveryId, Problem> {
    text.parse().map_err(|_| Problem::not_found("delivery"))
}

pub(crate) async fn show(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Path(id): Path<String>,
    Query(query): Query<DoneQuery>,
) -> Result<DeliveryPage, PageProblem> {
    let id = parse_id(&id)?;
    let delivery = deliveries::find(&app.pool, session.scope(), id)
        .await?
        .ok_or_else(|| Problem::not_found("delivery"))?;
    let body = events::load(&app.pool, &[id.event])
        .await?
        .pop()
        .map(|event| event.body)
        .unwrap_or_default();
    Ok(DeliveryPage {
        frame: Frame::new(session, "deliveries").with_done(&query.done, &DONE),
        line: Line::from(&delivery),
        reason: delivery.reason.map(in_words),
        next_attempt: Moment(delivery.due_at),
        attempts: attempts_of(&app, &mut *app.pool.acquire().await?, &delivery).await?,
        body: String::from_utf8_lossy(&body).into_owned(),
    })
}

pub(crate) async fn replay(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
    Extension(arrived): Extension<Arrived>,
    Confirmed { seen }: Confirmed,
) -> Result<Redirect, PageProblem> {
    let id = parse_id(&id)?;
    let mut transaction = tables::begin(&app.pool).await?;
    let asked = Asked { arrived, seen };
    crate::replay::replay(&mut transaction, &actor, session.scope(), id, asked).await?;
    transaction.commit().await?;
    app.wake.now();
    Ok(Redirect::to(&format!("/deliveries/{id}?done=replayed")))
}
