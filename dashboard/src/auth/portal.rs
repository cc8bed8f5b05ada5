//! Portal links: let a customer into the pages of their own tenant.
//! Invariant: a link can be used once within 15 minutes, and only its hash is stored.

use std::net::IpAddr;

use axum::http::HeaderMap;
use chrono::{DateTime, Utc};
use data_encoding::BASE64URL_NOPAD;
use serde_json::json;
use sqlx::PgConnection;

use super::{Actor, Session, Tenant, fingerprint};
use crate::{
    App,
    http::problem::Problem,
    tables::{
        self,
        audit::{self, Action, Entry},
        portal_links,
        sessions::{self, Holder},
    },
};

const LINK_MINUTES: i32 = 15;
/// Length of our tokens; others are not looked up.
const TOKEN_CHARS: usize = 43;

pub(crate) struct Link {
    pub(crate) url: String,
    pub(crate) expires_at: DateTime<Utc>,
}

pub(crate) async fn make(
    app: &App,
    connection: &mut PgConnection,
    actor: &Actor,
    tenant: &Tenant,
) -> Result<Link, Problem> {
    let token = BASE64URL_NOPAD.encode(&rand::random::<[u8; 32]>());
    portal_links::delete_expired(&mut *connection).await?;
    let expires_at =
        portal_links::insert(&mut *connection, &fingerprint(&token), tenant.id, LINK_MINUTES).await?;
    let entry = Entry::new(actor, Action::PortalLinkCreated, Some(tenant.id), &tenant.slug);
    audit::write(connection, entry).await?;
    // In the query string: only the path of a request is logged.
    let url = format!("{}/portal?token={token}", app.public_url.trim_end_matches('/'));
    Ok(Link { url, expires_at })
}

/// Redeems the link and opens a session. Returns the session token for the cookie, or none if the link is no longer
/// valid.
pub(crate) async fn redeem(
    app: &App,
    token: &str,
    address: Option<IpAddr>,
) -> Result<Option<String>, Problem> {
    if token.len() != TOKEN_CHARS {
        return Ok(None);
    }
    let link_hash = fingerprint(token);
    let mut transaction = tables::begin(&app.pool).await?;
    let Some(tenant) = portal_links::take(&mut *transaction, &link_hash).await? else {
        return Ok(None);
    };
    let session = Session::begin_for_tenant(&mut transaction, tenant.id, &link_hash).await?;
    let actor = Actor::new(format!("portal:{}", tenant.slug)).at(address);
    let entry = Entry::new(&actor, Action::PortalOpened, Some(tenant.id), &tenant.slug)
        .with(json!({"address": address}));
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(Some(session))
}

/// Whether the browser has the session that this link opened: a reload, or a second click on the link.
pub(crate) async fn is_open(app: &App, token: &str, headers: &HeaderMap) -> Result<bool, Problem> {
    if token.len() != TOKEN_CHARS {
        return Ok(false);
    }
    let Some(session) = Session::of(&app.pool, headers).await? else {
        return Ok(false);
    };
    let link_hash = fingerprint(token);
    Ok(sessions::was_opened_by(&app.pool, &session.token_hash(), &link_hash).await?)
}

/// Ends all sessions opened by links of this tenant, and revokes unused links.
pub(crate) async fn end_all(
    connection: &mut PgConnection,
    actor: &Actor,
    tenant: &Tenant,
) -> Result<(), Problem> {
    portal_links::delete_of_tenant(&mut *connection, tenant.id).await?;
    sessions::delete_all(&mut *connection, Holder::Tenant(tenant.id)).await?;
    let entry = Entry::new(actor, Action::SignedOutEverywhere, Some(tenant.id), &tenant.slug);
    audit::write(connection, entry).await?;
    Ok(())
}
