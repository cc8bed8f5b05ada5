//! What this machine needs in order to send: certificates, name servers, a way out. Connections are opened and closed; nothing
//! is sent over them.

use std::{net::SocketAddr, time::Duration};

use sqlx::PgConnection;
use tokio::{
    net::{TcpStream, lookup_host},
    time::timeout,
};
use url::Url;

use super::Finding;
use crate::{http::guard::Guard, store::sending};

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
    // With a proxy, names of endpoints are resolved here and connections go through it.
    let mut addresses = Vec::new();
    let mut unresolved = 0;
    for url in &urls {
        match resolve(url).await {
            Some(address) => addresses.push(address),
            None => unresolved += 1,
        }
    }
    let tried = urls.len();
    let names = match (tried, unresolved) {
        (0, _) => Finding::ok(CHECK, "there is no healthy endpoint to try"),
        (_, 0) => Finding::ok(CHECK, format!("the hosts of {tried} endpoints resolve")),
        _ => Finding::warning(
            CHECK,
            format!("the hosts of {unresolved} of {tried} endpoints do not resolve"),
            "Check this machine's name servers.",
        ),
    };
    let may_connect = sending::state(&mut *db).await.is_ok_and(|state| !state.stopped);
    let mut findings = vec![names];
    if may_connect && !addresses.is_empty() && guard.egress_proxy.is_none() {
        findings.push(connections(&addresses, guard).await);
    }
    findings
}

async fn resolve(url: &Url) -> Option<SocketAddr> {
    let (host, port) = (url.host_str()?, url.port_or_known_default()?);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let found = timeout(TRY_TIME_MAX, lookup_host((host, port))).await;
    found.ok()?.ok()?.next()
}

async fn connections(addresses: &[SocketAddr], guard: &Guard) -> Finding {
    const CHECK: &str = "egress.connections";
    let (mut refused, mut failed, mut made) = (0, 0, 0);
    for address in addresses {
        if guard.check(address.ip(), address.port()).is_err() {
            refused += 1;
            continue;
        }
        match timeout(TRY_TIME_MAX, TcpStream::connect(address)).await {
            Ok(Ok(_)) => made += 1,
            _ => failed += 1,
        }
    }
    let found = format!("of {} endpoints, {made} can be reached", addresses.len());
    match (refused, failed) {
        (0, 0) => Finding::ok(CHECK, found),
        (0, _) => Finding::warning(
            CHECK,
            format!("{found}; connections to {failed} fail"),
            "Check the firewall and network policies of this machine: docs/egress.md.",
        ),
        _ => Finding::warning(
            CHECK,
            format!("{found}; {refused} are in networks that are not allowed"),
            "See POSTRIDER_ALLOW_NETWORKS and POSTRIDER_DENY_NETWORKS: docs/egress.md.",
        ),
    }
}
