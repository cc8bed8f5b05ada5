//! The tenant pages: search, creation, settings, deletion, and portal links for customers.

use askama::Template;
use askama_web::WebTemplate;
use axum::{extract::Path, response::Redirect};
use postrider_proto::api::TenantSettings;
use serde::Deserialize;

use super::{Done, Frame, Moment, Paged};
use crate::{
    Shared,
    actions::tenants::{remove, store},
    auth::{
        Confirmed, Session, Submitted, Tenant, Visit,
        portal::{self, Link},
    },
    http::{
        input::{Query, is_plain_text},
        pagination,
        problem::Problem,
    },
    tables::{
        self,
        api_keys::{self, KeyRow},
        audit::{self, AuditRow, Narrowed},
        sessions::{self, Holder},
        tenants::{self, TenantRow, TenantSummary},
    },
};

const LINES: i64 = 50;
const KEYS_SHOWN_MAX: i64 = 100;
const ENTRIES_SHOWN: i64 = 10;
const SEARCH_BYTES_MAX: usize = 200;
const DONE: [(&str, &str); 3] = [
    ("made", "Tenant created."),
    ("changed", "Tenant updated."),
    ("ended", "All customers of this tenant were signed out."),
];
const DONE_LIST: [(&str, &str); 1] = [("removed", "Tenant deleted.")];

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct TenantsQuery {
    q: String,
    cursor: Option<String>,
    done: String,
}

#[derive(Template, WebTemplate)]
#[template(path = "tenants.html")]
pub(crate) struct TenantsPage {
    frame: Frame,
    search: String,
    lines: Vec<TenantSummary>,
    next: Option<String>,
}

impl TenantsPage {
    fn moment(&self, row: &TenantRow) -> Moment {
        Moment(Some(row.created_at))
    }
}

pub(crate) async fn list(visit: Visit, Query(query): Query<TenantsQuery>) -> Paged<TenantsPage> {
    if !is_plain_text(&query.q, SEARCH_BYTES_MAX) {
        return Err(Problem::bad_request(format!(
            "Invalid search text: must be plain text of at most {SEARCH_BYTES_MAX} bytes."
        ))
        .into());
    }
    let after: Option<String> = pagination::after(query.cursor.as_deref())?;
    let found = tenants::search(
        &visit.app.pool,
        query.q.trim(),
        &after.unwrap_or_default(),
        LINES + 1,
    )
    .await?;
    let page = pagination::cut(found, LINES, |tenant| tenant.row.slug.clone());
    Ok(TenantsPage {
        frame: Frame::new(visit.session, "tenants").with_done(&query.done, &DONE_LIST),
        search: query.q,
        lines: page.data,
        next: page.next_cursor,
    })
}

#[derive(Template, WebTemplate)]
#[template(path = "tenant.html")]
pub(crate) struct TenantPage {
    frame: Frame,
    tenant: TenantSummary,
    created: Moment,
    /// Active keys that are limited to this tenant.
    keys: Vec<KeyRow>,
    customers: i64,
    entries: Vec<AuditRow>,
    /// The portal link that was just created; it is shown only once.
    link: Option<Link>,
}

impl TenantPage {
    fn name(&self) -> &str {
        self.tenant.row.name.as_deref().unwrap_or_default()
    }

    fn at(&self, entry: &AuditRow) -> Moment {
        Moment(Some(entry.at))
    }

    fn expires(&self, link: &Link) -> Moment {
        Moment(Some(link.expires_at))
    }
}

pub(crate) async fn show(
    visit: Visit,
    Path(slug): Path<String>,
    Query(query): Query<Done>,
) -> Paged<TenantPage> {
    let mut page = load(&visit.app, visit.session, &slug, None).await?;
    page.frame = page.frame.with_done(&query.done, &DONE);
    Ok(page)
}

async fn find(app: &Shared, slug: &str) -> Result<TenantRow, Problem> {
    tenants::find(&app.pool, slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))
}

async fn load(app: &Shared, session: Session, slug: &str, link: Option<Link>) -> Paged<TenantPage> {
    let row = find(app, slug).await?;
    let of_tenant = Narrowed {
        tenant: Some(row.id),
        actor: None,
    };
    Ok(TenantPage {
        created: Moment(Some(row.created_at)),
        keys: api_keys::list_of_tenant(&app.pool, row.id, KEYS_SHOWN_MAX).await?,
        customers: sessions::count(&app.pool, Holder::Tenant(row.id)).await?,
        entries: audit::list(&app.pool, &of_tenant, i64::MAX, ENTRIES_SHOWN).await?,
        tenant: tenants::summary(&app.pool, row.id).await?,
        frame: Frame::new(session, "tenants"),
        link,
    })
}

#[derive(Deserialize)]
pub(crate) struct MakeForm {
    id: String,
    name: String,
}

/// Creates a tenant. Unlike the API's PUT, it never changes an existing one.
pub(crate) async fn make(visit: Visit, Submitted(form): Submitted<MakeForm>) -> Paged<Redirect> {
    let slug = form.id.trim();
    if tenants::find(&visit.app.pool, slug).await?.is_some() {
        return Err(Problem::conflict(format!("A tenant with the ID {slug:?} already exists.")).into());
    }
    let wanted = TenantSettings {
        name: text_or_none(form.name),
        ..TenantSettings::default()
    };
    let (row, _) = store(&visit.app, &visit.actor, slug, wanted).await?;
    Ok(Redirect::to(&format!("/tenants/{}?done=made", row.slug)))
}

#[derive(Deserialize)]
pub(crate) struct ChangeForm {
    name: String,
    rotate_every_days: String,
    retention_days: String,
}

pub(crate) async fn change(
    visit: Visit,
    Path(slug): Path<String>,
    Submitted(form): Submitted<ChangeForm>,
) -> Paged<Redirect> {
    let row = find(&visit.app, &slug).await?;
    let wanted = TenantSettings {
        name: text_or_none(form.name),
        rotate_every_days: days("rotate_every_days", &form.rotate_every_days)?,
        retention_days: days("retention_days", &form.retention_days)?,
        all_operational_events: Some(row.all_operational_events),
    };
    store(&visit.app, &visit.actor, &row.slug, wanted).await?;
    Ok(Redirect::to(&format!("/tenants/{}?done=changed", row.slug)))
}

fn days(field: &str, text: &str) -> Result<Option<i64>, Problem> {
    match text.trim() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| {
            let detail = format!("must be a whole number of days, not {text:?}");
            Problem::invalid(format!("/{field}"), detail)
        }),
    }
}

fn text_or_none(text: String) -> Option<String> {
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[derive(Deserialize)]
pub(crate) struct RemoveForm {
    /// The tenant ID, repeated as a confirmation.
    confirm: String,
}

pub(crate) async fn delete(
    visit: Visit,
    Path(slug): Path<String>,
    Submitted(form): Submitted<RemoveForm>,
) -> Paged<Redirect> {
    if form.confirm.trim() != slug {
        return Err(Problem::invalid("/confirm", format!("must be the tenant ID {slug:?}")).into());
    }
    remove(&visit.app, &visit.actor, &slug).await?;
    Ok(Redirect::to("/tenants?done=removed"))
}

pub(crate) async fn make_link(visit: Visit, Path(slug): Path<String>, _: Confirmed) -> Paged<TenantPage> {
    let row = find(&visit.app, &slug).await?;
    let tenant = Tenant {
        id: row.id,
        slug: row.slug,
    };
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let link = portal::make(&visit.app, &mut transaction, &visit.actor, &tenant).await?;
    transaction.commit().await?;
    load(&visit.app, visit.session, &slug, Some(link)).await
}

pub(crate) async fn end_sessions(visit: Visit, Path(slug): Path<String>, _: Confirmed) -> Paged<Redirect> {
    let row = find(&visit.app, &slug).await?;
    let tenant = Tenant {
        id: row.id,
        slug: row.slug,
    };
    let mut transaction = tables::begin(&visit.app.pool).await?;
    portal::end_all(&mut transaction, &visit.actor, &tenant).await?;
    transaction.commit().await?;
    Ok(Redirect::to(&format!("/tenants/{}?done=ended", tenant.slug)))
}
