//! The tenant pages: search, creation, settings, deletion, and portal links for customers.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use postrider_proto::{
    TenantId,
    api::{PortalLink, QuotaSettings, TenantSettings},
    limits::DESCRIPTION_BYTES_MAX,
};
use serde::Deserialize;

use super::{Done, FormErrors, Frame, Moment, Paged, When as _};
use crate::{
    Shared,
    actions::{
        self, audit_log, form_results,
        tenants::{remove, store},
    },
    auth::{Confirmed, Session, Submitted, Tenant, Visit, portal},
    http::{
        cells::{Positions, app_of, ask, name_of},
        input::{Query, is_plain_text},
        pagination,
        problem::{Faults, Kind, Problem, excerpt},
    },
    tables::{
        self,
        api_keys::{self, KeyRow},
        audit::{AuditRow, Narrowed},
        quotas::{self, QuotaRow},
        sessions::{self, Holder},
        tenants::{self, TenantRow, TenantSummary},
    },
};

const LINES: i64 = 50;
const KEYS_SHOWN_MAX: i64 = 100;
const ENTRIES_SHOWN: i64 = 10;
/// As long as a name.
const SEARCH_BYTES_MAX: usize = DESCRIPTION_BYTES_MAX;
const DONE: [(&str, &str); 6] = [
    ("quotas", "Quotas saved."),
    ("paused", "Tenant paused. New events are queued."),
    ("resumed", "Tenant resumed. Queued events are being sent."),
    ("made", "Tenant created."),
    ("changed", "Tenant updated."),
    ("ended", "All customers of this tenant were signed out."),
];
/// The result of the form that creates a portal link.
const NEW_LINK: &str = "portal-link";
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
    search_errors: FormErrors,
    lines: Vec<TenantSummary>,
    next: Option<String>,
    /// Cells that a new tenant may be in, if there are several.
    cells: Vec<String>,
    form: MakeForm,
    errors: FormErrors,
}

/// With what the tenants' cells have counted. Also returns the cells that did not respond.
async fn counted(
    app: &Shared,
    mut found: Vec<TenantSummary>,
) -> Result<(Vec<TenantSummary>, Vec<String>), Problem> {
    if !app.cells.any() {
        return Ok((found, Vec::new()));
    }
    let ids: Vec<TenantId> = found.iter().map(|tenant| tenant.row.id).collect();
    let answers = ask(app, move |app| {
        let ids = ids.clone();
        async move { Ok(tenants::counts(&app.pool, &ids).await?) }
    })
    .await?;
    for (cell, counts) in answers.found {
        for (id, endpoints, dead_letters) in counts {
            let is_its = |one: &&mut TenantSummary| one.row.id == id && one.row.cell_id == cell;
            if let Some(one) = found.iter_mut().find(is_its) {
                (one.endpoints, one.dead_letters) = (endpoints, dead_letters);
            }
        }
    }
    Ok((found, answers.silent))
}

fn cells_to_choose(app: &Shared) -> Vec<String> {
    let others = app.cells.list();
    let home = (!others.is_empty()).then(|| "home".to_owned());
    let open = others.into_iter().filter(|cell| cell.row.state == "open");
    home.into_iter().chain(open.map(|cell| cell.row.name)).collect()
}

impl TenantsPage {
    fn moment(&self, row: &TenantRow) -> Moment {
        Moment(Some(row.created_at))
    }
}

pub(crate) async fn list(visit: Visit, Query(query): Query<TenantsQuery>) -> Paged<Response> {
    let page = load_list(&visit, query).await?;
    Ok((page.search_errors.status(), page).into_response())
}

async fn load_list(visit: &Visit, query: TenantsQuery) -> Paged<TenantsPage> {
    let after: Option<String> = pagination::after(query.cursor.as_deref())?;
    let (pool, text) = (&visit.app.pool, query.q.trim());
    let mut silent = Vec::new();
    let (found, search_errors) = match is_plain_text(text, SEARCH_BYTES_MAX) {
        true => {
            let found = tenants::search(pool, text, &after.unwrap_or_default(), LINES + 1).await?;
            let (found, missing) = counted(&visit.app, found).await?;
            silent = missing;
            (found, FormErrors::default())
        }
        false => {
            let detail = format!("must be plain text of at most {SEARCH_BYTES_MAX} bytes");
            (Vec::new(), FormErrors::of(Problem::invalid("/q", detail))?)
        }
    };
    let page = pagination::cut(found, LINES, |tenant| tenant.row.slug.clone());
    Ok(TenantsPage {
        frame: Frame::new(visit.session.clone(), "tenants")
            .with_done(&query.done, &DONE_LIST)
            .without(&silent),
        cells: cells_to_choose(&visit.app),
        search: query.q,
        search_errors,
        lines: page.data,
        next: page.next_cursor,
        form: MakeForm::default(),
        errors: FormErrors::default(),
    })
}

#[derive(Template, WebTemplate)]
#[template(path = "tenant.html")]
pub(crate) struct TenantPage {
    frame: Frame,
    tenant: TenantSummary,
    /// In an installation with several.
    cell: Option<String>,
    created: Moment,
    /// Active keys that are limited to this tenant.
    keys: Vec<KeyRow>,
    customers: i64,
    entries: Vec<AuditRow>,
    quotas: QuotaRow,
    /// The portal link that was just created; it is shown only once.
    link: Option<PortalLink>,
    form: ChangeForm,
    errors: FormErrors,
    quota_form: QuotaForm,
    quota_errors: FormErrors,
    /// What was entered to confirm the deletion.
    confirm: String,
    delete_errors: FormErrors,
}

impl TenantPage {
    fn name(&self) -> &str {
        self.tenant.row.name.as_deref().unwrap_or_default()
    }

    fn at(&self, entry: &AuditRow) -> Moment {
        Moment(Some(entry.at))
    }

    fn expires(&self, link: &PortalLink) -> Moment {
        Moment(Some(link.expires_at))
    }
}

pub(crate) async fn show(
    visit: Visit,
    Path(slug): Path<String>,
    Query(query): Query<Done>,
) -> Paged<TenantPage> {
    let link = form_results::take(&visit.app, &visit.session, NEW_LINK, &query.result).await?;
    let mut page = load(&visit.app, visit.session, &slug).await?;
    page.link = link;
    page.frame = page.frame.with_done(&query.done, &DONE);
    Ok(page)
}

async fn find(app: &Shared, slug: &str) -> Result<TenantRow, Problem> {
    tenants::find(&app.pool, slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))
}

async fn load(app: &Shared, session: Session, slug: &str) -> Paged<TenantPage> {
    let row = find(app, slug).await?;
    let there = app_of(app, row.cell_id)?;
    let of_tenant = Narrowed {
        tenant: Some(row.id),
        ..Narrowed::default()
    };
    let quotas = quotas::find(&there.pool, row.id).await?;
    let entries = audit_log::list(app, &of_tenant, &Positions::default(), ENTRIES_SHOWN).await?;
    Ok(TenantPage {
        form: ChangeForm::from(&row),
        quota_form: QuotaForm::from(&quotas),
        quotas,
        created: Moment(Some(row.created_at)),
        keys: api_keys::list_of_tenant(&app.pool, row.id, KEYS_SHOWN_MAX).await?,
        customers: sessions::count(&app.home, Holder::Tenant(row.id)).await?,
        cell: name_of(app, row.cell_id),
        entries: entries.rows,
        tenant: tenants::summary(&there.pool, row.id).await?,
        frame: Frame::new(session, "tenants").without(&entries.silent),
        link: None,
        errors: FormErrors::default(),
        quota_errors: FormErrors::default(),
        confirm: String::new(),
        delete_errors: FormErrors::default(),
    })
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct MakeForm {
    id: String,
    name: String,
    /// Empty: the one with the fewest tenants.
    cell: String,
}

/// Creates a tenant. Unlike the API's PUT, it never changes an existing one.
pub(crate) async fn make(visit: Visit, Submitted(form): Submitted<MakeForm>) -> Paged<Response> {
    match store_new(&visit, &form).await {
        Ok(row) => Ok(Redirect::to(&format!("/tenants/{}?done=made", row.slug)).into_response()),
        Err(problem) => {
            // Both are about the ID: it is taken, or not valid.
            let is_id = problem.kind == Kind::Conflict
                || problem
                    .errors
                    .first()
                    .is_some_and(|fault| fault.pointer.is_empty());
            let errors = match is_id {
                true => FormErrors::at("id", &problem),
                false => FormErrors::of(problem)?,
            };
            let page = load_list(&visit, TenantsQuery::default()).await?;
            Ok((errors.status(), TenantsPage { form, errors, ..page }).into_response())
        }
    }
}

async fn store_new(visit: &Visit, form: &MakeForm) -> Result<TenantRow, Problem> {
    let slug = form.id.trim();
    if tenants::find(&visit.app.pool, slug).await?.is_some() {
        return Err(Problem::conflict(format!(
            "A tenant with the ID {slug:?} already exists."
        )));
    }
    let wanted = TenantSettings {
        name: text_or_none(&form.name),
        cell: text_or_none(&form.cell),
        ..TenantSettings::default()
    };
    Ok(store(&visit.app, &visit.actor, slug, wanted).await?.0)
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct ChangeForm {
    name: String,
    rotate_every_days: String,
    retention_days: String,
}

impl From<&TenantRow> for ChangeForm {
    fn from(row: &TenantRow) -> Self {
        let days = |days: Option<i32>| days.map(|days| days.to_string()).unwrap_or_default();
        Self {
            name: row.name.clone().unwrap_or_default(),
            rotate_every_days: days(row.rotate_every_days.map(i32::from)),
            retention_days: days(row.retention_days.map(i32::from)),
        }
    }
}

pub(crate) async fn change(
    visit: Visit,
    Path(slug): Path<String>,
    Submitted(form): Submitted<ChangeForm>,
) -> Paged<Response> {
    match store_changed(&visit, &slug, &form).await {
        Ok(()) => Ok(Redirect::to(&format!("/tenants/{slug}?done=changed")).into_response()),
        Err(problem) => {
            let errors = FormErrors::of(problem)?;
            let page = load(&visit.app, visit.session, &slug).await?;
            Ok((errors.status(), TenantPage { form, errors, ..page }).into_response())
        }
    }
}

async fn store_changed(visit: &Visit, slug: &str, form: &ChangeForm) -> Result<(), Problem> {
    let row = find(&visit.app, slug).await?;
    let mut faults = Faults::default();
    let mut days = |field: &str, text: &str| match text.trim() {
        "" => None,
        text => text
            .parse()
            .map_err(|_| faults.add(field, format!("must be a whole number of days, not {text:?}")))
            .ok(),
    };
    let wanted = TenantSettings {
        name: text_or_none(&form.name),
        rotate_every_days: days("rotate_every_days", &form.rotate_every_days),
        retention_days: days("retention_days", &form.retention_days),
        all_operational_events: Some(row.all_operational_events),
        cell: None,
    };
    faults.done()?;
    store(&visit.app, &visit.actor, &row.slug, wanted).await?;
    Ok(())
}

fn text_or_none(text: &str) -> Option<String> {
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
) -> Paged<Response> {
    if form.confirm.trim() != slug {
        let detail = format!("must be {slug:?}, not {:?}", excerpt(form.confirm.trim()));
        let delete_errors = FormErrors::of(Problem::invalid("/confirm", detail))?;
        let page = TenantPage {
            confirm: form.confirm,
            delete_errors,
            ..load(&visit.app, visit.session, &slug).await?
        };
        return Ok((page.delete_errors.status(), page).into_response());
    }
    remove(&visit.app, &visit.actor, &slug).await?;
    Ok(Redirect::to("/tenants?done=removed").into_response())
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct PauseForm {
    reason: String,
}

pub(crate) async fn pause(
    visit: Visit,
    Path(slug): Path<String>,
    Submitted(form): Submitted<PauseForm>,
) -> Paged<Redirect> {
    actions::tenants::pause(&visit.app, &visit.actor, &slug, Some(&form.reason)).await?;
    Ok(Redirect::to(&format!("/tenants/{slug}?done=paused")))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct QuotaForm {
    emits_per_minute: String,
    stored_bytes: String,
}

impl From<&QuotaRow> for QuotaForm {
    fn from(row: &QuotaRow) -> Self {
        let number = |most: Option<i64>| most.map(|most| most.to_string()).unwrap_or_default();
        Self {
            emits_per_minute: number(row.emits_per_minute.map(i64::from)),
            stored_bytes: number(row.stored_bytes),
        }
    }
}

pub(crate) async fn set_quotas(
    visit: Visit,
    Path(slug): Path<String>,
    Submitted(quota_form): Submitted<QuotaForm>,
) -> Paged<Response> {
    match store_quotas(&visit, &slug, &quota_form).await {
        Ok(()) => Ok(Redirect::to(&format!("/tenants/{slug}?done=quotas")).into_response()),
        Err(problem) => {
            let quota_errors = FormErrors::of(problem)?;
            let page = TenantPage {
                quota_form,
                quota_errors,
                ..load(&visit.app, visit.session, &slug).await?
            };
            Ok((page.quota_errors.status(), page).into_response())
        }
    }
}

async fn store_quotas(visit: &Visit, slug: &str, form: &QuotaForm) -> Result<(), Problem> {
    let mut faults = Faults::default();
    let mut number = |field: &str, text: &str| match text.trim() {
        "" => None,
        text => text
            .parse()
            .map_err(|_| faults.add(field, format!("must be a whole number, not {:?}", excerpt(text))))
            .ok(),
    };
    let settings = QuotaSettings {
        emits_per_minute: number("emits_per_minute", &form.emits_per_minute),
        stored_bytes: number("stored_bytes", &form.stored_bytes),
    };
    faults.done()?;
    actions::quotas::put(&visit.app, &visit.actor, slug, &settings).await?;
    Ok(())
}

pub(crate) async fn resume(visit: Visit, Path(slug): Path<String>, _: Confirmed) -> Paged<Redirect> {
    actions::tenants::resume(&visit.app, &visit.actor, &slug).await?;
    Ok(Redirect::to(&format!("/tenants/{slug}?done=resumed")))
}

pub(crate) async fn make_link(visit: Visit, Path(slug): Path<String>, _: Confirmed) -> Paged<Redirect> {
    let row = find(&visit.app, &slug).await?;
    let tenant = Tenant {
        id: row.id,
        slug: row.slug,
    };
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let link = portal::make(&visit.app, &mut transaction, &visit.actor, &tenant).await?;
    let link = PortalLink {
        url: link.url,
        expires_at: link.expires_at,
    };
    let result = form_results::keep(&visit.app, &mut *transaction, &visit.session, NEW_LINK, &link).await?;
    transaction.commit().await?;
    Ok(Redirect::to(&format!("/tenants/{slug}?result={result}")))
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
