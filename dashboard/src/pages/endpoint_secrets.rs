//! The secrets page of an endpoint: active secrets and their expiry, revealed on request, and rotation with an overlap.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use postrider_proto::api::SecretValue;
use serde::Deserialize;

use super::{
    Done, Frame, Moment, Paged, When,
    endpoint::{Subject, framed},
};
use crate::{
    actions::{self, secrets::Rotation},
    auth::{Confirmed, Submitted, Visit},
    http::{input::Query, problem::Problem, wait_until_applied},
    tables::{
        self,
        rotations::{self, Of, RotationRow},
        secrets,
    },
};

/// The overlaps offered: seconds and label.
const OVERLAPS: [(&str, &str); 5] = [
    ("3600", "1 hour"),
    ("86400", "24 hours"),
    ("259200", "3 days"),
    ("604800", "7 days"),
    ("0", "None – revoke the old secret now"),
];

struct SecretSummary {
    state: &'static str,
    created: Moment,
    retires: Moment,
    /// Set only on the page that reveals it.
    shown: Option<String>,
}

#[derive(Template, WebTemplate)]
#[template(path = "endpoint_secrets.html")]
struct SecretsPage {
    frame: Frame,
    tab: &'static str,
    subject: Subject,
    lines: Vec<SecretSummary>,
    rotation: Option<RotationRow>,
    revealed: bool,
}

impl SecretsPage {
    fn overlaps(&self) -> [(&'static str, &'static str); 5] {
        OVERLAPS
    }

    fn is_pair(&self) -> bool {
        self.subject.row.public_key.is_some()
    }

    fn days_from(&self) -> i64 {
        postrider_proto::limits::ROTATE_DAYS_MIN
    }
}

async fn page(
    visit: &Visit,
    subject: Subject,
    done: &str,
    shown: &[Option<String>],
) -> Result<SecretsPage, Problem> {
    let lines = secrets::in_force(&visit.app.pool, subject.row.id)
        .await?
        .into_iter()
        .enumerate()
        .map(|(index, row)| SecretSummary {
            state: if row.retires_at.is_none() {
                "current"
            } else {
                "retiring"
            },
            created: Moment(Some(row.created_at)),
            retires: Moment(row.retires_at),
            shown: shown.get(index).cloned().flatten(),
        })
        .collect();
    Ok(SecretsPage {
        frame: framed(&visit.session, done),
        tab: "secrets",
        lines,
        rotation: rotations::list(&visit.app.pool, Of::Endpoint(subject.row.id), 0, 1)
            .await?
            .pop(),
        revealed: !shown.is_empty(),
        subject,
    })
}

pub(crate) async fn show(visit: Visit, Path(id): Path<String>, Query(query): Query<Done>) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    Ok(page(&visit, subject, &query.done, &[]).await?.into_response())
}

/// Renders the page with the secrets. A form and not a link, because it is recorded in the audit log.
pub(crate) async fn reveal(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    let opened = actions::secrets::reveal(&visit.app, &visit.actor, &subject.tenant, &id).await?;
    let shown: Vec<Option<String>> = opened
        .iter()
        .map(|one| {
            let shown = SecretValue::from(&one.secret);
            shown.secret.or(shown.public_key)
        })
        .collect();
    Ok(page(&visit, subject, "", &shown).await?.into_response())
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct RotateFields {
    overlap_seconds: String,
}

pub(crate) async fn rotate(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(fields): Submitted<RotateFields>,
) -> Paged<Redirect> {
    let subject = Subject::find(&visit, &id).await?;
    let overlap: i64 = fields
        .overlap_seconds
        .parse()
        .map_err(|_| Problem::bad_request("Invalid overlap: must be a whole number of seconds."))?;
    let rotation = Rotation::read(Some(overlap), None)?;
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let rotated = actions::secrets::rotate(
        &visit.app,
        &visit.actor,
        &subject.tenant,
        &id,
        &mut transaction,
        rotation,
    )
    .await?;
    wait_until_applied::commit(&visit.app, transaction, rotated.shard).await?;
    Ok(Redirect::to(&format!("/endpoints/{id}/secrets?done=rotated")))
}
