//! In which cell the handler of a route runs: a table, and a lookup once the caller is known. Without other cells than home there
//! is no lookup.

use axum::{
    RequestExt,
    extract::{RawPathParams, Request},
    http::Method,
};

use super::{Rule, Session};
use crate::{
    Shared,
    http::{
        cells::{Here, Purpose},
        problem::Problem,
    },
    tables::cells::Possession,
};

/// Whose data a route is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// What home has; or all tenants, and the handler asks every cell.
    Home,
    /// The tenant in the path.
    Tenant,
    /// A customer's tenant. For the team: what the address names, or all tenants.
    Named,
}

/// Of the catalogue, which home has.
const CATALOGUE: &str = "/event-types";
/// The directory, and sessions.
const AT_HOME: [&str; 2] = ["/v1/tenants/{tenant}", "/v1/tenants/{tenant}/portal-links"];

impl Place {
    pub(crate) fn of(path: &str, rule: Rule) -> Self {
        use Rule::{
            Account, Admin, Administer, Ask, Catalogue, Emit, Manage, Open, Operate, Own, See, Session,
            SignedIn,
        };
        match rule {
            Open | Session | Account | Admin | Catalogue | Administer | SignedIn => Self::Home,
            _ if AT_HOME.contains(&path) || path.starts_with(CATALOGUE) => Self::Home,
            Emit | Own => Self::Tenant,
            See | Ask | Operate | Manage => Self::Named,
        }
    }

    /// Adds `Here` to the request if it concerns one cell.
    pub(super) async fn find(self, app: &Shared, rule: Rule, request: &mut Request) -> Result<(), Problem> {
        if self == Self::Home || !app.cells.any() {
            return Ok(());
        }
        let params = request
            .extract_parts::<RawPathParams>()
            .await
            .map_err(|_| Problem::not_found("path"))?;
        let param = |wanted: &str| {
            let found = params.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| value.to_owned())
        };
        let purpose = purpose(rule, request.method());
        let session = request.extensions().get::<Session>();
        let own = session.and_then(|session| session.tenant.as_ref());
        let tenant = match (own, param("tenant")) {
            // Whatever the address names, it is theirs.
            (Some(own), _) => Some(own.slug.clone()),
            (None, in_path) => in_path,
        };
        let named = Named::find(param, request.uri().path(), request.uri().query());
        let here = match (tenant, named) {
            (Some(slug), _) | (None, Some(Named::Tenant(slug))) => {
                Here::of_tenant(app, &slug, purpose).await?
            }
            (None, Some(Named::Possession(what))) => Here::of(app, &what, purpose).await?,
            (None, None) => return Ok(()),
        };
        request.extensions_mut().insert(here);
        Ok(())
    }
}

fn purpose(rule: Rule, method: &Method) -> Purpose {
    match rule {
        Rule::Emit => Purpose::Emit,
        // It changes nothing, although it is a POST.
        Rule::Ask => Purpose::Read,
        _ if method.is_safe() => Purpose::Read,
        _ => Purpose::Change,
    }
}

/// What the address of a page names.
enum Named {
    Tenant(String),
    Possession(Possession),
}

impl Named {
    /// In the path, or as a filter of a list.
    fn find(param: impl Fn(&str) -> Option<String>, path: &str, query: Option<&str>) -> Option<Self> {
        let filter = |wanted: &str| {
            let mut pairs = url::form_urlencoded::parse(query.unwrap_or_default().as_bytes());
            let found = pairs.find(|(name, value)| name == wanted && !value.trim().is_empty());
            found.map(|(_, value)| value.trim().to_owned())
        };
        let possession = |find: &dyn Fn(&str) -> Option<String>| {
            let endpoint = find("endpoint").map(Possession::Endpoint);
            let delivery = || find("delivery").map(Possession::Delivery);
            let replay = || find("replay").map(Possession::Replay);
            let event = || find("event").map(Possession::Event);
            endpoint.or_else(delivery).or_else(replay).or_else(event)
        };
        if let Some(found) = possession(&param) {
            return Some(Self::Possession(found));
        }
        match filter("tenant") {
            Some(slug) => Some(Self::Tenant(slug)),
            // Tenants of several cells may have an event with this id, and a list of replays has those of all endpoints.
            None if path == "/events" || path == "/replays" => None,
            None => possession(&filter).map(Self::Possession),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_changed_at_home_and_deliveries_where_they_are() {
        for (path, rule, place) in [
            ("/v1/tenants/{tenant}", Rule::Admin, Place::Home),
            ("/v1/tenants/{tenant}", Rule::Own, Place::Home),
            ("/v1/tenants/{tenant}/quotas", Rule::Own, Place::Tenant),
            ("/v1/tenants/{tenant}/portal-links", Rule::Own, Place::Home),
            ("/v1/tenants/{tenant}/events", Rule::Emit, Place::Tenant),
            ("/tenants/{slug}", Rule::SignedIn, Place::Home),
            ("/event-types/{type}", Rule::See, Place::Home),
            ("/deliveries/{delivery}/replay", Rule::Operate, Place::Named),
            ("/deliveries", Rule::See, Place::Named),
        ] {
            assert_eq!(Place::of(path, rule), place, "{path}");
        }
    }

    #[test]
    fn an_address_names_a_tenant_or_something_of_one() {
        let named = |path: Option<(&str, &str)>, query: &str| {
            let param =
                |name: &str| path.and_then(|(known, value)| (known == name).then(|| value.to_owned()));
            match Named::find(param, "/deliveries", Some(query)) {
                Some(Named::Tenant(slug)) => slug,
                Some(Named::Possession(what)) => format!("{what:?}"),
                None => String::new(),
            }
        };
        assert_eq!(named(None, "state=dead&tenant=&endpoint="), "");
        assert_eq!(named(None, "endpoint=ep_1&tenant=acme"), "acme");
        assert_eq!(named(None, "endpoint=ep_1"), "Endpoint(\"ep_1\")");
        assert_eq!(
            named(Some(("delivery", "dlv_1")), "tenant=acme"),
            "Delivery(\"dlv_1\")"
        );
    }
}
