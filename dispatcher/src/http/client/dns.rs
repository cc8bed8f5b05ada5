//! Resolves names without a thread per query: a dead or slow resolver delays only those who wait for that name.
//! Invariant: each name has at most one query in progress, and the search list is never used: `a.example.com` is
//! exactly that.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use hickory_resolver::{
    TokioResolver,
    config::{LookupIpStrategy, ResolveHosts},
    net::NetError,
};
use tokio::sync::OnceCell;

use crate::lock::lock;

/// Names whose addresses are cached, each for its TTL.
const NAMES_REMEMBERED_MAX: u64 = 8192;
/// Upper bound of the TTL, so that a moved address is found again.
const REMEMBERED_MAX: Duration = Duration::from_secs(300);
/// A newly created name should be found soon.
const ABSENCE_REMEMBERED_MAX: Duration = Duration::from_secs(10);
/// Timeout of one query to one server.
const QUESTION_TIME: Duration = Duration::from_secs(3);
/// Minimum interval between reloads of the name servers, after a query without a response.
const SERVERS_READ_AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NameError {
    #[error("DNS lookup failed for {0}: no such name")]
    NotFound(String),
    #[error("DNS lookup failed for {0}: the name servers did not respond")]
    NoResponse(String),
}

type Resolution = Result<Arc<[IpAddr]>, NameError>;

#[derive(Clone)]
pub(crate) struct Names {
    resolver: Arc<Mutex<Resolver>>,
    pending: Arc<Mutex<HashMap<String, Arc<OnceCell<Resolution>>>>>,
}

struct Resolver {
    inner: TokioResolver,
    made: Instant,
}

impl Resolver {
    /// With the machine's name servers and hosts file.
    fn new() -> Result<Self, NetError> {
        let mut builder = TokioResolver::builder_tokio()?;
        let options = builder.options_mut();
        // Always both families: the guard needs the whole set.
        options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        options.use_hosts_file = ResolveHosts::Always;
        options.cache_size = NAMES_REMEMBERED_MAX;
        options.positive_max_ttl = Some(REMEMBERED_MAX);
        options.negative_max_ttl = Some(ABSENCE_REMEMBERED_MAX);
        options.timeout = options.timeout.min(QUESTION_TIME);
        Ok(Self {
            inner: builder.build()?,
            made: Instant::now(),
        })
    }
}

impl Names {
    pub(crate) fn new() -> Result<Self, NetError> {
        Ok(Self {
            resolver: Arc::new(Mutex::new(Resolver::new()?)),
            pending: Arc::default(),
        })
    }

    /// All addresses of a name. Concurrent callers for the same name share one query.
    pub(crate) async fn addresses(&self, name: &str) -> Resolution {
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        let query = Query {
            cell: lock(&self.pending).entry(name.clone()).or_default().clone(),
            names: self,
            name,
        };
        query.cell.get_or_init(|| self.look_up(&query.name)).await.clone()
    }

    async fn look_up(&self, name: &str) -> Resolution {
        // A trailing dot makes the name absolute: the search list is not applied.
        let resolver = lock(&self.resolver).inner.clone();
        match resolver.lookup_ip(format!("{name}.")).await {
            Ok(found) => {
                let addresses: Arc<[IpAddr]> = found.iter().collect();
                if addresses.is_empty() {
                    Err(NameError::NotFound(name.to_owned()))
                } else {
                    Ok(addresses)
                }
            }
            Err(error) if error.is_no_records_found() || error.is_nx_domain() => {
                Err(NameError::NotFound(name.to_owned()))
            }
            Err(error) => {
                tracing::debug!(%error, name, "DNS lookup failed");
                self.read_servers_again();
                Err(NameError::NoResponse(name.to_owned()))
            }
        }
    }

    /// The machine's name servers may have changed.
    fn read_servers_again(&self) {
        let mut resolver = lock(&self.resolver);
        if resolver.made.elapsed() > SERVERS_READ_AGAIN
            && let Ok(new) = Resolver::new()
        {
            *resolver = new;
        }
    }
}

/// Removed when the last waiter is gone, with or without a result: caching is the resolver's job.
struct Query<'n> {
    names: &'n Names,
    name: String,
    cell: Arc<OnceCell<Resolution>>,
}

impl Drop for Query<'_> {
    fn drop(&mut self) {
        let mut pending = lock(&self.names.pending);
        // One reference is ours, one the map's. Once a result is in, the next caller queries again.
        let is_last = Arc::strong_count(&self.cell) <= 2;
        let is_same = pending
            .get(&self.name)
            .is_some_and(|cell| Arc::ptr_eq(cell, &self.cell));
        if is_same && (is_last || self.cell.initialized()) {
            pending.remove(&self.name);
        }
    }
}
