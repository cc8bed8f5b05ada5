//! The API keys page for admins: keys are created, shown once and revoked here.

use askama::Template;
use askama_web::WebTemplate;
use axum::{extract::Path, response::Redirect};
use postrider_proto::{
    api::{ApiKey, NewApiKey},
    state::KeyRole,
};
use serde::Deserialize;

use super::{Done, Frame, Moment, Paged};
use crate::{
    Shared,
    actions::api_keys::{end, make},
    auth::{Confirmed, Session, Submitted, Visit},
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

pub(crate) async fn show(visit: Visit, Query(query): Query<Done>) -> Paged<KeysPage> {
    let mut page = load(&visit.app, visit.session, None).await?;
    page.frame = page.frame.with_done(&query.done, &DONE);
    Ok(page)
}

async fn load(app: &Shared, session: Session, new: Option<ApiKey>) -> Paged<KeysPage> {
    Ok(KeysPage {
        frame: Frame::new(session, "api-keys"),
        keys: api_keys::list_newest(&app.pool, KEYS_SHOWN_MAX).await?,
        new,
    })
}

pub(crate) async fn create(visit: Visit, Submitted(form): Submitted<MakeForm>) -> Paged<KeysPage> {
    let wanted = NewApiKey {
        role: form.role,
        tenant: Some(form.tenant.trim().to_owned()).filter(|slug| !slug.is_empty()),
        name: form.name,
    };
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let created = make(&mut transaction, &visit.actor, wanted).await?;
    transaction.commit().await?;
    load(&visit.app, visit.session, Some(created)).await
}

pub(crate) async fn revoke(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    end(&visit.app, &visit.actor, &id).await?;
    Ok(Redirect::to("/api-keys?done=revoked"))
}
