//! What this machine needs in order to send: certificates, name servers, a way out. Connections are opened and closed; nothing
//! is sent over them.

use std::time::Duration;

use sqlx::PgConnection;
use url::Url;

use super::Finding;
use crate::{
    http::{
        client::{HttpSender, Reach},
        guard::Guard,
    },
    store::sending,
};

/// Hosts of endpoints that are tried.
const HOSTS_MAX: i64 = 5;
const TRY_TIME_MAX: Duration = Duration::from_secs(3);

pub(super) fn certificates() -> Finding {
    const CHECK: &str = "egress.certificates";
    let store = rustls_native_certs::load_native_certs();
    match (store.certs.len(), store.errors.first()) {
        (0, _) => Finding::warning(
            CHECK,
            "this machine has no CA certificates; the bundled ones are used",
            "Install the package ca-certificates, so that new and revoked authorities are known.",
        ),
        (count, Some(error)) => Finding::warning(
            CHECK,
            format!("{count} CA certificates; others can't be read: {error}"),
            "Fix the files of the certificate store.",
        ),
        (count, None) => Finding::ok(CHECK, format!("{count} CA certificates")),
    }
}

/// Names and connections of a few endpoints, chosen at random. Hosts are counted, not named: they belong to customers.
pub(super) async fn endpoints(db: &mut PgConnection, guard: &Guard) -> Vec<Finding> {
    const CHECK: &str = "egress.names";
    let urls: Result<Vec<String>, sqlx::Error> = sqlx::query_scalar(
        "select e.url from postrider.endpoints e
         where e.state = 'active' and not exists (select from postrider.endpoint_health h where h.endpoint_id = e.id)
         order by random() limit $1",
    )
    .bind(HOSTS_MAX)
    .fetch_all(&mut *db)
    .await;
    let urls: Vec<Url> = match urls {
        Ok(urls) => urls.iter().filter_map(|url| Url::parse(url).ok()).collect(),
        Err(error) => return vec![Finding::unknown(CHECK, error)],
    };
    let Ok(sender) = HttpSender::new(guard.clone(), urls.len().max(1)) else {
        let advice = "Check /etc/resolv.conf.";
        return vec![Finding::error(
            CHECK,
            "the system's DNS configuration can't be read",
            advice,
        )];
    };
    let connects = sending::state(&mut *db).await.is_ok_and(|state| !state.stopped);
    let mut reached = Vec::new();
    for url in &urls {
        reached.push(sender.reach(url, connects, TRY_TIME_MAX).await);
    }
    let count = |wanted: Reach| reached.iter().filter(|one| **one == wanted).count();
    let (tried, unresolved) = (urls.len(), count(Reach::Unresolved));
    let mut findings = vec![match (tried, unresolved) {
        (0, _) => Finding::ok(CHECK, "there is no healthy endpoint to try"),
        (_, 0) => Finding::ok(
            CHECK,
            format!("hosts of endpoints that resolve: {tried} of {tried}"),
        ),
        _ => Finding::warning(
            CHECK,
            format!("hosts of endpoints that do not resolve: {unresolved} of {tried}"),
            "Check this machine's name servers.",
        ),
    }];
    if connects && tried > unresolved {
        let counts = [Reach::Reached, Reach::Failed, Reach::NotAllowed].map(count);
        findings.push(connections(counts));
    }
    findings
}

fn connections([made, failed, refused]: [usize; 3]) -> Finding {
    const CHECK: &str = "egress.connections";
    let found = format!(
        "endpoints that can be reached: {made} of {}",
        made + failed + refused
    );
    match (refused, failed) {
        (0, 0) => Finding::ok(CHECK, found),
        (0, _) => Finding::warning(
            CHECK,
            format!("{found}; connections to {failed} fail"),
            "Check the firewall, the network policies and the proxy of this machine: docs/egress.md.",
        ),
        _ => Finding::warning(
            CHECK,
            format!("{found}; {refused} are not allowed"),
            "See POSTRIDER_ALLOW_NETWORKS and POSTRIDER_DENY_NETWORKS: docs/egress.md.",
        ),
    }
}
