//! The API keys page for admins: keys are created, shown once and revoked here.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::{Path, State},
    response::Redirect,
};
use postrider_proto::{
    api::{ApiKey, NewApiKey},
    state::KeyRole,
};
use serde::Deserialize;

use super::{DoneQuery, Frame, Moment, PageProblem};
use crate::{
    Shared,
    actions::api_keys::{end, make},
    auth::{Actor, Confirmed, Session, Submitted},
    http::input::Query,
    tables::{
        self,
        api_keys::{self, KeyRow},
    },
};

const KEYS_SHOWN_MAX: i64 = 500;
const DONE: [(&str, &str); 1] = [("revoked", "Key revoked.")];

#[derive(Template, WebTemplate)]
#[template(path = "api_keys.html")]
pub(crate) struct KeysPage {
    frame: Frame,
    keys: Vec<KeyRow>,
    /// The key that was just created; it is shown only once.
    new: Option<ApiKey>,
}

impl KeysPage {
    fn created(&self, key: &KeyRow) -> Moment {
        Moment(Some(key.created_at))
    }

    fn revoked(&self, key: &KeyRow) -> Moment {
        Moment(key.revoked_at)
    }
}

#[derive(Deserialize)]
pub(crate) struct MakeForm {
    role: KeyRole,
    name: String,
    #[serde(default)]
    tenant: String,
}

pub(crate) async fn show(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Query(query): Query<DoneQuery>,
) -> Result<KeysPage, PageProblem> {
    let mut page = load(&app, session, None).await?;
    page.frame = page.frame.with_done(&query.done, &DONE);
    Ok(page)
}

async fn load(app: &Shared, session: Session, new: Option<ApiKey>) -> Result<KeysPage, PageProblem> {
    Ok(KeysPage {
        frame: Frame::new(session, "api-keys"),
        keys: api_keys::list_newest(&app.pool, KEYS_SHOWN_MAX).await?,
        new,
    })
}

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Extension(actor): Extension<Actor>,
    Submitted(form): Submitted<MakeForm>,
) -> Result<KeysPage, PageProblem> {
    let wanted = NewApiKey {
        role: form.role,
        tenant: Some(form.tenant.trim().to_owned()).filter(|slug| !slug.is_empty()),
        name: form.name,
    };
    let mut transaction = tables::begin(&app.pool).await?;
    let created = make(&mut transaction, &actor, wanted).await?;
    transaction.commit().await?;
    load(&app, session, Some(created)).await
}

pub(crate) async fn revoke(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
    _: Confirmed,
) -> Result<Redirect, PageProblem> {
    end(&app, &actor, &id).await?;
    Ok(Redirect::to("/api-keys?done=revoked"))
}
