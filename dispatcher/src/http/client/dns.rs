//! Names to addresses, without a thread for each question: a resolver that is dead or slow holds up only those who wait
//! for that name.
//! Invariant: a name is asked for once at a time, and its search list is never used: `a.example.com` is just that.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hickory_resolver::{
    TokioResolver,
    config::{LookupIpStrategy, ResolveHosts},
    net::NetError,
};
use tokio::sync::OnceCell;

/// Names whose addresses are remembered, each as long as the DNS says.
const NAMES_REMEMBERED_MAX: u64 = 8192;
/// However long the DNS says: an address that was moved is found again.
const REMEMBERED_MAX: Duration = Duration::from_secs(300);
/// A name that was just made should be found soon.
const ABSENCE_REMEMBERED_MAX: Duration = Duration::from_secs(10);
/// For one question to one server.
const QUESTION_TIME: Duration = Duration::from_secs(3);
/// After a question that nobody answered, and not more often than this.
const SERVERS_READ_AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NameError {
    #[error("the name {0} can't be found")]
    NotFound(String),
    #[error("the name {0} could not be looked up: the name servers did not answer")]
    NoAnswer(String),
}

type Resolution = Result<Arc<[IpAddr]>, NameError>;

#[derive(Clone)]
pub(crate) struct Names {
    resolver: Arc<Mutex<Resolver>>,
    asked: Arc<Mutex<HashMap<String, Arc<OnceCell<Resolution>>>>>,
}

struct Resolver {
    inner: TokioResolver,
    made: Instant,
}

impl Resolver {
    /// With the machine's own name servers and hosts file.
    fn new() -> Result<Self, NetError> {
        let mut builder = TokioResolver::builder_tokio()?;
        let options = builder.options_mut();
        // Both families always: the guard wants the whole set.
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
            asked: Arc::default(),
        })
    }

    /// All addresses of a name. Whoever asks while the same is being asked waits for that answer.
    pub(crate) async fn addresses(&self, name: &str) -> Resolution {
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        let question = Question {
            cell: self.asked().entry(name.clone()).or_default().clone(),
            names: self,
            name,
        };
        question
            .cell
            .get_or_init(|| self.look_up(&question.name))
            .await
            .clone()
    }

    async fn look_up(&self, name: &str) -> Resolution {
        // With a dot at its end the name is whole: nothing is hung onto it.
        let resolver = self.resolver().inner.clone();
        match resolver.lookup_ip(format!("{name}.")).await {
            Ok(found) => {
                let addresses: Arc<[IpAddr]> = found.iter().collect();
                match addresses.is_empty() {
                    true => Err(NameError::NotFound(name.to_owned())),
                    false => Ok(addresses),
                }
            }
            Err(error) if error.is_no_records_found() || error.is_nx_domain() => {
                Err(NameError::NotFound(name.to_owned()))
            }
            Err(error) => {
                tracing::debug!(%error, name, "a name could not be looked up");
                self.read_servers_again();
                Err(NameError::NoAnswer(name.to_owned()))
            }
        }
    }

    /// The machine may have other name servers by now.
    fn read_servers_again(&self) {
        let mut resolver = self.resolver();
        if resolver.made.elapsed() > SERVERS_READ_AGAIN
            && let Ok(new) = Resolver::new()
        {
            *resolver = new;
        }
    }

    fn resolver(&self) -> MutexGuard<'_, Resolver> {
        self.resolver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asked(&self) -> MutexGuard<'_, HashMap<String, Arc<OnceCell<Resolution>>>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgotten when the last who waits for it goes, with or without an answer: the resolver remembers, not we.
struct Question<'n> {
    names: &'n Names,
    name: String,
    cell: Arc<OnceCell<Resolution>>,
}

impl Drop for Question<'_> {
    fn drop(&mut self) {
        let mut asked = self.names.asked();
        // One count is ours, one the map's. With an answer in it, the next one asks anew.
        let is_last = Arc::strong_count(&self.cell) <= 2;
        let is_same = asked
            .get(&self.name)
            .is_some_and(|cell| Arc::ptr_eq(cell, &self.cell));
        if is_same && (is_last || self.cell.initialized()) {
            asked.remove(&self.name);
        }
    }
}
