//! The preview of bulk replays, and the action that starts them: of groups of dead letters, or of one request.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::RawQuery,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use data_encoding::BASE64URL_NOPAD;
use postrider_dispatcher::replays::RATE_DEFAULT;
use postrider_proto::{
    DeadReason, TenantId,
    api::{NewReplay, ReplayPreview},
    limits::REPLAY_RATE_MAX,
};
use serde::Deserialize;

use super::{
    FormErrors, Frame, Paged,
    dead_letters::{self, cause_label},
    replays,
};
use crate::{
    App,
    actions::replays::{Wanted, begin, dry_run, read},
    auth::{Submitted, Visit},
    http::{
        cells::Purpose,
        problem::{Kind, Problem, excerpt},
    },
    tables::{
        self,
        cells::Possession,
        endpoints::{self, EndpointRow},
    },
};

/// Groups that can be selected at once. Each becomes its own replay.
pub(super) const GROUPS_MAX: usize = 50;

/// One of the replays that would be started.
struct Preview {
    form: NewReplay,
    /// The endpoint's URL, or the given ID if there is no such endpoint.
    endpoint: String,
    found: Result<ReplayPreview, String>,
}

impl Preview {
    fn reason(&self) -> Option<String> {
        let given = self.form.reason.as_deref()?;
        let reason = DeadReason::ALL.iter().find(|reason| reason.as_str() == given)?;
        let failure = self.form.failure.as_deref().and_then(|text| text.parse().ok());
        Some(cause_label(Some(*reason), failure))
    }
}

#[derive(Template, WebTemplate)]
#[template(path = "replay_preview.html")]
pub(crate) struct PreviewPage {
    frame: Frame,
    previews: Vec<Preview>,
    total: i64,
    /// The requests, encoded for the form that starts them.
    asks: String,
    rate: String,
    rate_max: i32,
    errors: FormErrors,
}

/// Previews the replay of several groups of dead letters (`group=endpoint~type~reason~failure`), or of one request.
pub(crate) async fn preview(visit: Visit, RawQuery(query): RawQuery) -> Paged<Response> {
    let query = query.unwrap_or_default();
    let forms = read_query(&query);
    if let Some(error) = selection_error(forms.len()) {
        return refuse_selection(visit, &query, error).await;
    }
    let visit = in_one_cell(
        visit,
        forms.iter().map(|form| form.endpoint.clone()).collect(),
        Purpose::Read,
    )
    .await?;
    // Of a single request only the form on the page of replays has an endpoint that was typed.
    if let [form] = forms.as_slice()
        && form.r#type.is_none()
        && let Err(problem) = endpoint_of(&visit.app, visit.session.scope(), form).await
        && problem.kind == Kind::Invalid
    {
        return replays::rejected(visit, &query, problem).await;
    }
    Ok(load_preview(&visit, forms).await?.into_response())
}

/// The visit in the cell that has all of these endpoints. A request changes one database.
pub(super) async fn in_one_cell(
    visit: Visit,
    endpoints: Vec<Option<String>>,
    purpose: Purpose,
) -> Result<Visit, Problem> {
    let mut found: Option<Visit> = None;
    for endpoint in endpoints.into_iter().flatten() {
        let there = visit.clone().at(&Possession::Endpoint(endpoint), purpose).await?;
        if let Some(before) = &found
            && before.app.cell != there.app.cell
        {
            return Err(Problem::bad_request(
                "The selected groups are in different cells. Select groups of one cell at a time.",
            ));
        }
        found.get_or_insert(there);
    }
    Ok(found.unwrap_or(visit))
}

/// What is wrong with a selection of so many groups.
pub(super) fn selection_error(groups: usize) -> Option<String> {
    match groups {
        0 => Some("Select at least one group.".to_owned()),
        1..=GROUPS_MAX => None,
        count => Some(format!(
            "Select at most {GROUPS_MAX} groups at a time, not {count}."
        )),
    }
}

/// The dead letters with the same selection.
pub(super) async fn refuse_selection(visit: Visit, query: &str, error: String) -> Paged<Response> {
    let selected = url::form_urlencoded::parse(query.as_bytes())
        .filter(|(name, _)| name == "group")
        .map(|(_, value)| value.into_owned())
        .collect();
    let page = dead_letters::rejected(visit, selected, error).await?;
    Ok((StatusCode::BAD_REQUEST, page).into_response())
}

async fn load_preview(visit: &Visit, forms: Vec<NewReplay>) -> Result<PreviewPage, Problem> {
    let mut previews = Vec::new();
    for form in forms {
        let mut endpoint = form.endpoint.clone().unwrap_or_default();
        let found = match endpoint_of(&visit.app, visit.session.scope(), &form).await {
            Ok(row) => {
                let wanted = read(&visit.app, row.tenant_id, &form).await;
                endpoint = row.settings.url;
                match wanted {
                    Ok(wanted) => count_within_share(&visit.app, &wanted).await,
                    Err(problem) => Err(problem),
                }
            }
            Err(problem) => Err(problem),
        };
        let found = found.map_err(|problem| problem.detail);
        previews.push(Preview {
            form,
            endpoint,
            found,
        });
    }
    let good = previews.iter().filter(|preview| preview.found.is_ok());
    let asks: Vec<&NewReplay> = good.map(|preview| &preview.form).collect();
    let asks = BASE64URL_NOPAD.encode(&serde_json::to_vec(&asks).unwrap_or_default());
    let total = previews.iter().filter_map(|one| one.found.as_ref().ok());
    let total = total.map(|found| found.total).sum();
    Ok(PreviewPage {
        frame: Frame::new(visit.session.clone(), "replays"),
        total,
        asks,
        previews,
        rate: RATE_DEFAULT.to_string(),
        rate_max: REPLAY_RATE_MAX,
        errors: FormErrors::default(),
    })
}

async fn count_within_share(app: &App, wanted: &Wanted) -> Result<ReplayPreview, Problem> {
    let _count = app.limits.counts.take(&wanted.counts_as()).await?;
    dry_run(app, &mut *app.pool.acquire().await?, wanted).await
}

pub(super) fn read_query(query: &str) -> Vec<NewReplay> {
    let mut one = NewReplay::default();
    let mut groups = Vec::new();
    for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
        let text = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        match name.as_ref() {
            "group" => groups.extend(read_group(&value)),
            "endpoint" => one.endpoint = text,
            "kind" => one.kind = text,
            "state" => one.state = text,
            "type" => one.r#type = text,
            "since" => one.since = text.map(in_utc),
            "until" => one.until = text.map(in_utc),
            _ => {}
        }
    }
    if groups.is_empty() && one.endpoint.is_some() {
        let NewReplay { kind, state, .. } = &mut one;
        // The form has a single choice for both fields.
        if kind.as_deref() != Some("missing") {
            *state = state.take().or(kind.take()).filter(|word| word != "failed");
        }
        return vec![one];
    }
    for group in &mut groups {
        group.since.clone_from(&one.since);
        group.until.clone_from(&one.until);
    }
    groups
}

fn read_group(text: &str) -> Option<NewReplay> {
    let mut parts = text.split('~').map(str::to_owned);
    Some(NewReplay {
        endpoint: Some(parts.next()?),
        r#type: Some(parts.next()?),
        reason: Some(parts.next()?),
        failure: Some(parts.next()?),
        state: Some("dead".to_owned()),
        ..NewReplay::default()
    })
}

/// Values of `datetime-local` inputs have no time zone.
fn in_utc(text: String) -> String {
    match text.len() {
        16 => format!("{text}:00Z"),
        19 => format!("{text}Z"),
        _ => text,
    }
}

/// The endpoint to replay to. Customers find only their own.
pub(super) async fn endpoint_of(
    app: &App,
    scope: Option<TenantId>,
    form: &NewReplay,
) -> Result<EndpointRow, Problem> {
    let public_id = form.endpoint.as_deref().unwrap_or_default();
    let missing = || Problem::invalid("/endpoint", format!("there is no endpoint {public_id:?}"));
    let number = endpoints::find_number(&app.pool, scope, public_id)
        .await?
        .ok_or_else(missing)?;
    endpoints::find_by_id(&app.pool, number)
        .await?
        .ok_or_else(missing)
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct StartForm {
    asks: String,
    rate_per_second: String,
}

pub(crate) async fn start(visit: Visit, Submitted(form): Submitted<StartForm>) -> Paged<Response> {
    let asked = || serde_json::from_slice(&BASE64URL_NOPAD.decode(form.asks.as_bytes()).ok()?).ok();
    let asks: Vec<NewReplay> =
        asked().ok_or_else(|| Problem::bad_request("Malformed form. Go back and try again."))?;
    if asks.is_empty() || asks.len() > GROUPS_MAX {
        return Err(Problem::bad_request("Nothing to replay.").into());
    }
    let visit = in_one_cell(
        visit,
        asks.iter().map(|ask| ask.endpoint.clone()).collect(),
        Purpose::Change,
    )
    .await?;
    match begin_all(&visit, &asks, form.rate_per_second.trim()).await {
        Ok(Some(id)) if asks.len() == 1 => {
            Ok(Redirect::to(&format!("/replays/{id}?done=started")).into_response())
        }
        Ok(_) => Ok(Redirect::to("/replays").into_response()),
        Err(problem) => {
            let errors = FormErrors::of(problem)?;
            let page = PreviewPage {
                rate: form.rate_per_second,
                errors,
                ..load_preview(&visit, asks).await?
            };
            Ok((page.errors.status(), page).into_response())
        }
    }
}

pub(super) fn read_rate(text: &str) -> Result<i64, Problem> {
    text.parse().map_err(|_| {
        let detail = format!("must be a whole number, not {:?}", excerpt(text));
        Problem::invalid("/rate_per_second", detail)
    })
}

/// Returns the id of the first replay.
async fn begin_all(visit: &Visit, asks: &[NewReplay], rate: &str) -> Result<Option<String>, Problem> {
    let rate = read_rate(rate)?;
    // Before the transaction: a request that holds a connection must not wait for another one.
    let mut all = Vec::new();
    for mut ask in asks.iter().cloned() {
        ask.rate_per_second = Some(rate);
        let endpoint = endpoint_of(&visit.app, visit.session.scope(), &ask).await?;
        all.push(read(&visit.app, endpoint.tenant_id, &ask).await?);
    }
    let _count = match all.first() {
        Some(wanted) => Some(visit.app.limits.counts.take(&wanted.counts_as()).await?),
        None => None,
    };
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let mut first = None;
    for wanted in all {
        let replay = begin(&visit.app, &mut transaction, &visit.actor, &wanted).await?;
        first.get_or_insert(replay.public_id);
    }
    transaction.commit().await?;
    visit.app.wake.now();
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_single_requests_are_read_from_the_address() {
        let forms = read_query(
            "group=ep_1~invoice.paid~gone~410&group=ep_2~a~exhausted~timed_out&since=2026-01-01T00:00",
        );
        assert_eq!(forms.len(), 2);
        assert_eq!(forms[0].endpoint.as_deref(), Some("ep_1"));
        assert_eq!(forms[1].reason.as_deref(), Some("exhausted"));
        assert_eq!(forms[1].failure.as_deref(), Some("timed_out"));
        assert_eq!(forms[1].since.as_deref(), Some("2026-01-01T00:00:00Z"));
        let one = read_query("endpoint=ep_1&kind=failed&since=");
        assert_eq!((one.len(), &one[0].state, &one[0].since), (1, &None, &None));
        assert_eq!(
            read_query("endpoint=ep_1&kind=delivered")[0].state.as_deref(),
            Some("delivered")
        );
        assert_eq!(
            read_query("endpoint=ep_1&kind=missing")[0].kind.as_deref(),
            Some("missing")
        );
        assert!(read_query("group=broken").is_empty());
    }
}
