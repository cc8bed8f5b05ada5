//! Discarding groups of dead letters: a page that asks for confirmation, and the action. `delivery.rs` discards a single one.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::RawQuery,
    response::{IntoResponse, Redirect, Response},
};
use chrono::{DateTime, SecondsFormat, Utc};
use data_encoding::BASE64URL_NOPAD;
use postrider_proto::{
    DeadReason,
    api::{NewDiscard, NewReplay},
    limits::DISCARDED_MAX,
};
use serde::Deserialize;

use super::{
    Frame, Paged,
    dead_letters::cause_label,
    replay_preview::{GROUPS_MAX, endpoint_of, in_one_cell, read_query, refuse_selection, selection_error},
};
use crate::{
    actions::{delivery_filter::parse_time, discards},
    auth::{Submitted, Visit},
    http::{cells::Purpose, problem::Problem},
    tables,
};

/// One of the groups that would be discarded.
struct DiscardGroup {
    form: NewDiscard,
    url: String,
    count: i64,
}

impl DiscardGroup {
    fn cause(&self) -> Option<String> {
        let given = self.form.reason.as_deref();
        let reason = DeadReason::ALL
            .iter()
            .find(|reason| Some(reason.as_str()) == given);
        let failure = self.form.failure.as_deref().and_then(|text| text.parse().ok());
        reason.map(|reason| cause_label(Some(*reason), failure))
    }
}

#[derive(Template, WebTemplate)]
#[template(path = "discard.html")]
pub(crate) struct DiscardPage {
    frame: Frame,
    groups: Vec<DiscardGroup>,
    total: i64,
    /// The requests, encoded for the form that carries them out.
    asks: String,
    /// Dead letters of a later time were not counted and are left alone.
    as_of: String,
    limit: i64,
}

fn to_discard(form: NewReplay) -> NewDiscard {
    NewDiscard {
        endpoint: form.endpoint,
        r#type: form.r#type,
        reason: form.reason,
        failure: form.failure,
        since: form.since,
        until: form.until,
    }
}

pub(crate) async fn confirm(visit: Visit, RawQuery(query): RawQuery) -> Paged<Response> {
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
    let as_of: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(&visit.app.pool)
        .await
        .map_err(Problem::from)?;
    let mut groups = Vec::new();
    for form in forms {
        let endpoint = endpoint_of(&visit.app, visit.session.scope(), &form).await?;
        let form = to_discard(form);
        let wanted = discards::read(&visit.app, endpoint.tenant_id, form.clone()).await?;
        let share = endpoint.tenant_id.to_string();
        let _count = visit.app.limits.counts.take(&share).await?;
        groups.push(DiscardGroup {
            count: discards::count(&visit.app, &wanted).await?,
            url: endpoint.settings.url,
            form,
        });
    }
    let asks: Vec<&NewDiscard> = groups.iter().map(|group| &group.form).collect();
    let page = DiscardPage {
        frame: Frame::new(visit.session, "dead-letters"),
        asks: BASE64URL_NOPAD.encode(&serde_json::to_vec(&asks).unwrap_or_default()),
        total: groups.iter().map(|group| group.count).sum(),
        groups,
        as_of: as_of.to_rfc3339_opts(SecondsFormat::Micros, true),
        limit: DISCARDED_MAX,
    };
    Ok(page.into_response())
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct DiscardForm {
    asks: String,
    as_of: String,
}

pub(crate) async fn submit(visit: Visit, Submitted(form): Submitted<DiscardForm>) -> Paged<Redirect> {
    let asked = || serde_json::from_slice(&BASE64URL_NOPAD.decode(form.asks.as_bytes()).ok()?).ok();
    let asks: Vec<NewDiscard> =
        asked().ok_or_else(|| Problem::bad_request("Malformed form. Go back and try again."))?;
    if asks.is_empty() || asks.len() > GROUPS_MAX {
        return Err(Problem::bad_request("Nothing to discard.").into());
    }
    let visit = in_one_cell(
        visit,
        asks.iter().map(|ask| ask.endpoint.clone()).collect(),
        Purpose::Change,
    )
    .await?;
    let as_of = parse_time("as_of", &form.as_of)?;
    // Before the transaction: a request that holds a connection must not wait for another one.
    let mut all = Vec::new();
    for ask in asks {
        let found = NewReplay {
            endpoint: ask.endpoint.clone(),
            ..NewReplay::default()
        };
        let endpoint = endpoint_of(&visit.app, visit.session.scope(), &found).await?;
        let mut wanted = discards::read(&visit.app, endpoint.tenant_id, ask).await?;
        wanted.bounds.died_by = Some(as_of);
        all.push(wanted);
    }
    // In one order, so that two requests for the same groups wait for each other instead of deadlocking.
    all.sort_by_key(|wanted| {
        let bounds = &wanted.bounds;
        let reason = bounds.reason.map(|reason| reason.to_string());
        (
            wanted.endpoint.id.0,
            bounds.type_id.map(|id| id.0),
            reason,
            bounds.failure.map(|failure| failure.to_string()),
        )
    });
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let (mut left, mut is_complete) = (DISCARDED_MAX, true);
    for wanted in &all {
        let done = discards::discard(&mut transaction, &visit.actor, wanted, left).await?;
        left -= done.discarded;
        is_complete &= done.is_complete;
    }
    transaction.commit().await.map_err(Problem::from)?;
    Ok(Redirect::to(match is_complete {
        true => "/dead-letters?done=discarded",
        false => "/dead-letters?done=discarded-partly",
    }))
}
