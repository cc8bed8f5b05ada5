//! The secrets page of an endpoint: active secrets and their expiry, revealed on request, and rotation with an overlap.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use postrider_proto::api::SecretValue;
use serde::{Deserialize, Serialize};

use super::{
    Done, FormErrors, Frame, Moment, Paged, When,
    endpoint::{Subject, framed},
};
use crate::{
    actions::{self, form_results, secrets::Rotation},
    auth::{Confirmed, Submitted, Visit},
    http::{
        input::Query,
        problem::{Problem, excerpt},
        wait_until_applied,
    },
    tables::{
        self,
        rotations::{self, Of, RotationRow},
        secrets,
    },
};

/// The result of the form that reveals the secrets.
const REVEALED: &str = "secrets";
const OVERLAP_DEFAULT: &str = "86400";
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
    overlap: String,
    errors: FormErrors,
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
        overlap: OVERLAP_DEFAULT.to_owned(),
        errors: FormErrors::default(),
    })
}

/// The secrets of one endpoint, newest first.
#[derive(Serialize, Deserialize)]
struct Revealed {
    endpoint: String,
    secrets: Vec<Option<String>>,
}

pub(crate) async fn show(visit: Visit, Path(id): Path<String>, Query(query): Query<Done>) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    let revealed: Option<Revealed> =
        form_results::take(&visit.app, &visit.session, REVEALED, &query.result).await?;
    let shown = revealed
        .filter(|revealed| revealed.endpoint == id)
        .map(|revealed| revealed.secrets)
        .unwrap_or_default();
    Ok(page(&visit, subject, &query.done, &shown).await?.into_response())
}

/// Shows the secrets on the page. A form and not a link, because it is recorded in the audit log.
pub(crate) async fn reveal(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    let subject = Subject::find(&visit, &id).await?;
    let opened = actions::secrets::reveal(&visit.app, &visit.actor, &subject.tenant, &id).await?;
    let secrets = opened
        .iter()
        .map(|one| {
            let shown = SecretValue::from(&one.secret);
            shown.secret.or(shown.public_key)
        })
        .collect();
    let revealed = Revealed {
        endpoint: id.clone(),
        secrets,
    };
    let result = form_results::keep(&visit.app, &visit.app.home, &visit.session, REVEALED, &revealed).await?;
    Ok(Redirect::to(&format!("/endpoints/{id}/secrets?result={result}")))
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
) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    match store(&visit, &subject, &fields).await {
        Ok(overlap) => {
            let done = if overlap == 0 { "revoked" } else { "rotated" };
            Ok(Redirect::to(&format!("/endpoints/{id}/secrets?done={done}")).into_response())
        }
        Err(problem) => {
            let errors = FormErrors::of(problem)?;
            let page = SecretsPage {
                overlap: fields.overlap_seconds,
                errors,
                ..page(&visit, subject, "", &[]).await?
            };
            Ok((page.errors.status(), page).into_response())
        }
    }
}

/// Returns the overlap in seconds.
async fn store(visit: &Visit, subject: &Subject, fields: &RotateFields) -> Result<i64, Problem> {
    let overlap: i64 = fields.overlap_seconds.parse().map_err(|_| {
        let given = excerpt(&fields.overlap_seconds);
        let detail = format!("must be a whole number of seconds, not {given:?}");
        Problem::invalid("/overlap_seconds", detail)
    })?;
    let rotation = Rotation::read(Some(overlap), None)?;
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let rotated = actions::secrets::rotate(
        &visit.app,
        &visit.actor,
        &subject.tenant,
        subject.id(),
        &mut transaction,
        rotation,
    )
    .await?;
    wait_until_applied::commit(&visit.app, transaction, rotated.shard).await?;
    Ok(overlap)
}
