//! What can be done with an endpoint: create, change, pause and delete it.

pub(crate) mod certificates;
pub(crate) mod form;
pub(crate) mod health;
pub(crate) mod rules;
pub(crate) mod subscriptions;

use std::collections::BTreeMap;

use postrider_dispatcher::{guard::Guard, vault::custom_headers::CustomHeaders};
use postrider_proto::{
    EndpointState, Shard, TenantId,
    api::{self, SecretValue, TlsSettings},
    limits::{ENDPOINTS_PER_TENANT_MAX, SHARDS},
    signature::Secret,
};
use rand::RngExt;
use serde_json::{Value, json};
use sqlx::PgConnection;
use url::Url;

use self::{
    certificates::keep_tls,
    rules::{check_secret, write_wait},
};
use crate::{
    App,
    actions::{
        attempt_view::custom_header_names,
        secrets::{keep, open_in_force},
        tenants::lock_here,
    },
    auth::{Actor, Tenant},
    http::{
        problem::{Faults, Problem},
        wait_until_applied,
    },
    tables::{
        self,
        audit::{self, Action, Entry, changes},
        endpoints::{self as table, EndpointRow, EndpointSettings},
        schemas,
    },
};

/// A validated endpoint that is not stored yet.
pub(crate) struct NewEndpoint {
    settings: EndpointSettings,
    secret: Secret,
    headers: CustomHeaders,
    tls: Option<Option<TlsSettings>>,
}

impl NewEndpoint {
    /// Every check that needs no database.
    pub(crate) fn read(form: api::EndpointSettings, guard: &Guard) -> Result<Self, Problem> {
        let settings = form::create(&form, guard)?;
        let secret = match form.secret.flatten() {
            Some(own) => Secret::new(own),
            None => Secret::generate(settings.signature, &rand::random()),
        };
        Ok(Self {
            settings,
            secret,
            headers: form.headers.flatten().unwrap_or_default().into(),
            tls: form.tls,
        })
    }
}

/// A new endpoint and the part of its secret that is shown once.
pub(crate) struct Created {
    pub(crate) row: EndpointRow,
    pub(crate) shown: SecretValue,
}

/// Runs in the caller's transaction.
pub(crate) async fn create(
    app: &App,
    actor: &Actor,
    tenant: &Tenant,
    connection: &mut PgConnection,
    new: NewEndpoint,
) -> Result<Created, Problem> {
    let settings = &new.settings;
    let shard = Shard(rand::rng().random_range(0..SHARDS));
    check_pins(connection, settings, None).await?;
    lock_here(connection, tenant.id).await?;
    if table::count(&mut *connection, tenant.id).await? >= ENDPOINTS_PER_TENANT_MAX {
        return Err(Problem::limit_reached(format!(
            "A tenant can have at most {ENDPOINTS_PER_TENANT_MAX} endpoints. Delete one first."
        )));
    }
    let public_id = tables::random_public_id("ep");
    let mut row = table::insert(&mut *connection, tenant.id, &public_id, shard, settings).await?;
    if let Some(sealed) = new.headers.seal(&app.vault, row.owner()) {
        row = table::update(&mut *connection, row.id, settings, Some(&sealed)).await?;
    }
    keep_tls(&app.vault, &mut *connection, &mut row, new.tls).await?;
    let shown = keep(&app.vault, connection, row.owner(), &new.secret).await?;
    let entry = Entry::new(actor, Action::EndpointCreated, Some(tenant.id), &public_id)
        .with(json!({"url": settings.url}));
    audit::write(connection, entry).await?;
    Ok(Created { row, shown })
}

/// Locked until the transaction ends, as its tenant is: it can't begin to move meanwhile.
pub(crate) async fn lock_endpoint(
    connection: &mut PgConnection,
    tenant: TenantId,
    id: &str,
) -> Result<EndpointRow, Problem> {
    lock_here(connection, tenant).await?;
    let row = table::lock(connection, tenant, id).await?;
    row.ok_or_else(|| Problem::not_found("endpoint"))
}

/// Returns once the change is in effect.
pub(crate) async fn change(
    app: &App,
    actor: &Actor,
    tenant: &Tenant,
    id: &str,
    form: api::EndpointSettings,
) -> Result<EndpointRow, Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    let before = lock_endpoint(&mut transaction, tenant.id, id).await?;
    let settings = form::patch(&form, before.settings.clone(), &app.guard)?;
    check_pins(&mut transaction, &settings, Some(&before.settings)).await?;
    if settings.signature != before.settings.signature {
        for opened in open_in_force(&app.vault, &mut transaction, before.owner()).await? {
            check_secret(opened.secret.reveal(), settings.signature).map_err(|why| {
                Problem::invalid(
                    "/signature",
                    format!("the endpoint's current secret can't be used with this format: it {why}"),
                )
            })?;
        }
    }
    let had_tls = before.tls.is_some();
    let old_headers = custom_header_names(&app.vault, &before);
    let sealed = match form.headers {
        Some(headers) => CustomHeaders::from(headers.unwrap_or_default()).seal(&app.vault, before.owner()),
        // A caller who can change the URL must not receive the old host's credentials.
        None if is_elsewhere(&before.settings, &settings) => None,
        None => before.headers,
    };
    let mut row = table::update(&mut *transaction, before.id, &settings, sealed.as_deref()).await?;
    keep_tls(&app.vault, &mut *transaction, &mut row, form.tls).await?;
    let was_active = before.settings.state == EndpointState::Active;
    if !was_active && settings.state == EndpointState::Active {
        table::forget_failures(&mut *transaction, row.id).await?;
    }
    let secret_parts = [("headers", json!(old_headers)), ("tls", json!(had_tls))];
    let secret_parts_now = [
        ("headers", json!(custom_header_names(&app.vault, &row))),
        ("tls", json!(row.tls.is_some())),
    ];
    let mut changed = changes(audited(&before.settings), audited(&settings));
    changed.extend(changes(secret_parts, secret_parts_now));
    let entry = Entry::new(actor, Action::EndpointChanged, Some(tenant.id), id)
        .with(json!({"url": settings.url, "state": settings.state}))
        .changed(&changed);
    audit::write(&mut transaction, entry).await?;
    wait_until_applied::commit(app, transaction, row.shard).await?;
    Ok(row)
}

/// The settings as the audit log compares them. Of headers and certificates, which are secret, it only compares names and
/// whether there are any.
fn audited(settings: &EndpointSettings) -> [(&'static str, Value); 13] {
    [
        ("url", json!(settings.url)),
        ("description", json!(settings.description)),
        ("types", json!(settings.types)),
        ("versions", json!(settings.versions.as_ref().map(|json| &json.0))),
        ("filter", json!(settings.filter.as_ref().map(|json| &json.0))),
        ("concurrency", json!(settings.concurrency)),
        ("rate_per_second", json!(settings.rate_per_second)),
        ("ordered", json!(settings.ordered)),
        (
            "retry_schedule",
            json!(
                settings
                    .retry_schedule
                    .as_ref()
                    .map(|waits| { waits.iter().map(|ms| write_wait(*ms)).collect::<Vec<_>>() })
            ),
        ),
        ("timeout_ms", json!(settings.timeout_ms)),
        ("signature", json!(settings.signature)),
        ("rotate_every_days", json!(settings.rotate_every_days)),
        ("state", json!(settings.state)),
    ]
}

/// Returns once no more requests to it are started.
pub(crate) async fn delete(app: &App, actor: &Actor, tenant: &Tenant, id: &str) -> Result<(), Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    let row = lock_endpoint(&mut transaction, tenant.id, id).await?;
    table::delete(&mut *transaction, row.id).await?;
    let entry = Entry::new(actor, Action::EndpointDeleted, Some(tenant.id), id);
    audit::write(&mut transaction, entry).await?;
    wait_until_applied::commit(app, transaction, row.shard).await
}

/// A pin to an unpublished version would never match. Existing pins are kept even if their type was deleted: that is
/// no reason to reject an unrelated change.
async fn check_pins(
    connection: &mut PgConnection,
    settings: &EndpointSettings,
    before: Option<&EndpointSettings>,
) -> Result<(), Problem> {
    let pins = |settings: &EndpointSettings| settings.versions.clone().map(|json| json.0).unwrap_or_default();
    let had = before.map(pins).unwrap_or_default();
    let mut wanted = pins(settings);
    wanted.retain(|name, version| had.get(name) != Some(version));
    if wanted.is_empty() {
        return Ok(());
    }
    let (types, versions): (Vec<&str>, Vec<&str>) = wanted
        .iter()
        .map(|(name, version)| (name.as_str(), version.as_str()))
        .unzip();
    let there: BTreeMap<String, Option<String>> = schemas::are_there(connection, &types, &versions)
        .await?
        .into_iter()
        .collect();
    let mut faults = Faults::default();
    for (name, version) in &wanted {
        match there.get(name) {
            None => faults.add(
                &format!("versions/{name}"),
                format!("event type `{name}` does not exist"),
            ),
            Some(None) => faults.add(
                &format!("versions/{name}"),
                format!("event type `{name}` has no version `{version}`"),
            ),
            Some(Some(_)) => {}
        }
    }
    faults.done()
}

/// A different host or port, or the same host without TLS.
fn is_elsewhere(before: &EndpointSettings, after: &EndpointSettings) -> bool {
    let place = |settings: &EndpointSettings| {
        let url = Url::parse(&settings.url).ok()?;
        Some((
            url.scheme().to_owned(),
            url.host_str()?.to_owned(),
            url.port_or_known_default(),
        ))
    };
    place(before) != place(after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actions::endpoints::form::blank;

    #[test]
    fn another_host_or_port_is_elsewhere_and_another_path_is_not() {
        let at = |url: &str| EndpointSettings {
            url: url.to_owned(),
            ..blank()
        };
        let before = at("https://a.example.com/x");
        assert!(!is_elsewhere(&before, &at("https://a.example.com:443/y?z")));
        assert!(is_elsewhere(&before, &at("https://b.example.com/x")));
        assert!(is_elsewhere(&before, &at("https://a.example.com:444/x")));
        assert!(is_elsewhere(&before, &at("http://a.example.com/x")));
        assert!(is_elsewhere(
            &at("https://a.example.com:8443/x"),
            &at("http://a.example.com:8443/x")
        ));
    }
}
