//! The signature debugger page: inspects the signatures of a delivery or of a pasted request.
//! Signatures computed with a secret are shown only to users who may see the secret; see `signature_debugger`.

use askama::Template;
use askama_web::WebTemplate;
use axum::response::{IntoResponse, Response};
use chrono::Utc;
use postrider_proto::{
    DeliveryId, EndpointId, TenantId,
    signature::{SignatureFormat, diagnose::Captured},
};
use serde::Deserialize;

use super::{FormErrors, Frame, Moment, Paged};
use crate::{
    Shared,
    auth::{Session, Submitted, Visit},
    http::{
        cells::{Purpose, ask, merge},
        input::Query,
        problem::{Kind, Problem, excerpt},
    },
    pages::signature_debugger::{self, Command, Known, Mistake, Verdict},
    tables::{
        attempts,
        cells::Possession,
        deliveries::{self, Filter},
        endpoints::{self, EndpointRow},
        events, secrets,
    },
};

const SECRETS_SHOWN_MAX: i64 = 20;
const PICKS: i64 = 8;
/// Longer content is truncated on the page; the commands include all of it.
const SHOWN_BYTES_MAX: usize = 16 * 1024;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct SignaturesQuery {
    delivery: String,
    attempt: Option<i16>,
}

/// A recent delivery to choose from.
struct Pick {
    id: String,
    event: String,
    event_type: String,
    url: String,
}

/// A signature of the header and the secret it was made with.
struct Made {
    signature: String,
    state: &'static str,
    created: Moment,
    retires: Moment,
}

/// The details of an attempt.
struct Shown {
    delivery: String,
    event: String,
    url: String,
    number: i16,
    numbers: Vec<i16>,
    format: &'static str,
    sent: Moment,
    header: String,
    prefix: String,
    content: String,
    content_bytes: usize,
    is_cut: bool,
    made: Vec<Made>,
    commands: Vec<Command>,
    mistakes: Vec<Mistake>,
}

/// The pasted request, kept so that the form can show it again.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct PasteForm {
    endpoint: String,
    id: String,
    timestamp: String,
    signature: String,
    body: String,
}

#[derive(Template, WebTemplate)]
#[template(path = "signatures.html")]
pub(crate) struct SignaturesPage {
    frame: Frame,
    picks: Vec<Pick>,
    wanted: String,
    shown: Option<Shown>,
    pasted: PasteForm,
    verdict: Option<Verdict>,
    /// Of the form that inspects a delivery.
    errors: FormErrors,
    paste_errors: FormErrors,
}

pub(crate) async fn show(visit: Visit, Query(query): Query<SignaturesQuery>) -> Paged<Response> {
    let wanted = query.delivery.trim();
    let (shown, errors) = match wanted {
        "" => (None, None),
        text => match inspect(&visit.app, &visit.session, text, query.attempt).await {
            Ok(shown) => (Some(shown), None),
            Err(problem) if problem.kind == Kind::NotFound => {
                let detail = format!("there is no delivery {:?}", excerpt(text));
                let problem = Problem::new(Kind::NotFound, detail);
                (None, Some(FormErrors::at("delivery", &problem)))
            }
            Err(problem) if problem.kind == Kind::Conflict => {
                (None, Some(FormErrors::at("delivery", &problem)))
            }
            Err(problem) => return Err(problem.into()),
        },
    };
    let mut page = blank(&visit.app, visit.session).await?;
    page.wanted = wanted.to_owned();
    page.shown = shown;
    page.errors = errors.unwrap_or_default();
    Ok((page.errors.status(), page).into_response())
}

async fn blank(app: &Shared, session: Session) -> Paged<SignaturesPage> {
    let filter = Filter {
        tenant: session.scope(),
        ..Filter::default()
    };
    let answers = ask(app, move |app| {
        let filter = filter.clone();
        async move { Ok(deliveries::list(&app.pool, &filter, None, PICKS).await?) }
    })
    .await?;
    let (found, _) = merge(answers.parts(), PICKS, deliveries::Delivery::id);
    Ok(SignaturesPage {
        picks: found
            .iter()
            .map(|delivery| Pick {
                id: delivery.id().to_string(),
                event: delivery.event(),
                event_type: delivery.event_type.clone(),
                url: delivery.url.clone(),
            })
            .collect(),
        frame: Frame::new(session, "signatures"),
        wanted: String::new(),
        shown: None,
        pasted: PasteForm::default(),
        verdict: None,
        errors: FormErrors::default(),
        paste_errors: FormErrors::default(),
    })
}

async fn known(
    app: &Shared,
    endpoint: &EndpointRow,
    format: Option<SignatureFormat>,
) -> Result<Known, Problem> {
    let rows = secrets::latest(&app.pool, endpoint.id, SECRETS_SHOWN_MAX).await?;
    Ok(Known::open(&app.vault, endpoint.owner(), rows, format))
}

#[expect(
    clippy::disallowed_methods,
    reason = "compared with a pasted signature, as a receiver would"
)]
async fn inspect(app: &Shared, session: &Session, text: &str, number: Option<i16>) -> Result<Shown, Problem> {
    let missing = || Problem::not_found("delivery");
    let id: DeliveryId = text.parse().map_err(|_| missing())?;
    let delivery = deliveries::find(&app.pool, session.scope(), id)
        .await?
        .ok_or_else(missing)?;
    let endpoint = endpoints::find_by_id(&app.pool, id.endpoint)
        .await?
        .ok_or_else(missing)?;
    let body = events::load(&app.pool, delivery.tenant_id, &[id.event])
        .await?
        .pop()
        .map(|event| event.body)
        .unwrap_or_default();
    let sent: Vec<_> = attempts::of_delivery(&app.pool, id)
        .await?
        .into_iter()
        .filter(|attempt| attempt.signature.is_some())
        .collect();
    let attempt = sent
        .iter()
        .find(|attempt| number.is_none_or(|number| attempt.number == number))
        .ok_or_else(|| {
            Problem::conflict("No request was sent in this attempt, so there is no signature to inspect.")
        })?;
    let header = attempt.signature.clone().unwrap_or_default();
    let event = delivery.event();
    let timestamp = attempt.started_at.timestamp().to_string();
    let request = Captured {
        id: &event,
        timestamp: &timestamp,
        signature: &header,
        body: &body,
    };
    let known = known(app, &endpoint, None).await?;
    let now = Utc::now();
    let made: Vec<Made> = request
        .signatures()
        .into_iter()
        .map(|signature| {
            let life = known.life_of(&request, signature);
            Made {
                state: life.map_or("unknown", |life| life.state(now)),
                created: Moment(life.map(|life| life.created_at)),
                retires: Moment(life.and_then(|life| life.retires_at)),
                signature: signature.to_owned(),
            }
        })
        .collect();
    // Users who may not see the secret get the explanations without the signatures.
    let frame = Frame::new(session.clone(), "signatures");
    let secret = known.secrets.iter().find(|secret| secret.fits(request.format()));
    let mut mistakes = secret.map_or(Vec::new(), |secret| {
        signature_debugger::mistakes(&request, secret)
    });
    if !frame.may_manage() {
        mistakes.iter_mut().for_each(|mistake| mistake.signature.clear());
    }
    let shown = &body[..body.len().min(SHOWN_BYTES_MAX)];
    let prefix = request.signed_prefix();
    Ok(Shown {
        delivery: id.to_string(),
        url: delivery.url.clone(),
        number: attempt.number,
        numbers: sent.iter().map(|attempt| attempt.number).collect(),
        format: request.format().as_str(),
        sent: Moment(Some(attempt.started_at)),
        content: String::from_utf8_lossy(shown).into_owned(),
        content_bytes: prefix.len() + body.len(),
        is_cut: shown.len() < body.len(),
        commands: signature_debugger::commands(&request, secret),
        prefix,
        mistakes,
        made,
        header,
        event,
    })
}

/// Checks a pasted request. It is a POST although it changes nothing, because a body may be too long for an address.
#[expect(
    clippy::disallowed_methods,
    reason = "compared with a pasted signature, as a receiver would"
)]
pub(crate) async fn check(visit: Visit, Submitted(form): Submitted<PasteForm>) -> Paged<Response> {
    let what = Possession::Endpoint(form.endpoint.trim().to_owned());
    let there = visit.clone().at(&what, Purpose::Read).await?.app;
    let number = endpoints::find_number(&there.pool, visit.session.scope(), form.endpoint.trim()).await?;
    let endpoint = match load(&there, visit.session.scope(), number).await {
        Err(problem) if problem.kind == Kind::NotFound => {
            let detail = format!("there is no endpoint {:?}", excerpt(form.endpoint.trim()));
            let mut page = blank(&visit.app, visit.session).await?;
            page.paste_errors = FormErrors::of(Problem::invalid("/endpoint", detail))?;
            page.pasted = form;
            return Ok((page.paste_errors.status(), page).into_response());
        }
        found => found?,
    };
    let format = endpoint.settings.signature;
    let known = known(&there, &endpoint, Some(format)).await?;
    // Browsers submit line breaks as \r\n; bodies are sent with \n.
    let body = form.body.replace("\r\n", "\n");
    let request = Captured {
        id: form.id.trim(),
        timestamp: form.timestamp.trim(),
        signature: form.signature.trim(),
        body: body.as_bytes(),
    };
    let verdict = signature_debugger::verdict(&request, format, &known, Utc::now());
    let mut page = blank(&visit.app, visit.session).await?;
    page.verdict = Some(verdict);
    page.pasted = form;
    Ok(page.into_response())
}

async fn load(
    app: &Shared,
    scope: Option<TenantId>,
    number: Option<EndpointId>,
) -> Result<EndpointRow, Problem> {
    let row = match number {
        Some(number) => endpoints::find_by_id(&app.pool, number).await?,
        None => None,
    };
    row.filter(|row| scope.is_none_or(|tenant| tenant == row.tenant_id))
        .ok_or_else(|| Problem::not_found("endpoint"))
}
