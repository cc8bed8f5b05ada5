//! Fair shares: no tenant gets more than its part of connections, queue slots and CPU.
//! Invariants: a request over its tenant's share waits briefly and is then rejected with 429; it holds no shared
//! resource meanwhile. An idle tenant uses no memory.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::http::problem::Problem;

/// `Retry-After` of a rejected request.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Concurrency limits per tenant. People and keys without a tenant count individually.
#[derive(Debug)]
pub struct Limits {
    /// Running requests, which hold a connection or wait for one.
    pub(crate) requests: Arc<Shares>,
    /// Requests that wait for a third party's server.
    pub(crate) trials: Arc<Shares>,
    /// Statements that count or scan all of a tenant's events: each uses a CPU of the database.
    pub(crate) counts: Arc<Shares>,
    /// Exports being written, which continue after the response has started.
    pub(crate) exports: Arc<Shares>,
}

impl Default for Limits {
    fn default() -> Self {
        let wait = Duration::from_secs(3);
        Self {
            requests: Shares::new(Bounds {
                each: 3,
                all: 1_024,
                waiting: 256,
                wait,
            }),
            trials: Shares::new(Bounds {
                each: 8,
                all: 1_024,
                waiting: 16,
                wait,
            }),
            counts: Shares::new(Bounds {
                each: 1,
                all: 2,
                waiting: 4,
                wait: Duration::from_secs(2),
            }),
            exports: Shares::new(Bounds {
                each: 2,
                all: 1_024,
                waiting: 16,
                wait,
            }),
        }
    }
}

/// Limits of one resource.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Per tenant: less than the total.
    pub(crate) each: usize,
    pub(crate) all: usize,
    /// Waiting requests per tenant. More are rejected immediately.
    pub(crate) waiting: usize,
    pub(crate) wait: Duration,
}

#[derive(Debug)]
pub(crate) struct Shares {
    bounds: Bounds,
    all: Arc<Semaphore>,
    tenants: Mutex<HashMap<String, Entry>>,
}

#[derive(Debug)]
struct Entry {
    permits: Arc<Semaphore>,
    /// Holders of a permit and those waiting for one.
    users: usize,
}

/// A permit for the resource until it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    _user: User,
    _permits: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

#[derive(Debug)]
struct User {
    shares: Arc<Shares>,
    name: String,
}

impl Shares {
    pub(crate) fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self {
            bounds,
            all: Arc::new(Semaphore::new(bounds.all)),
            tenants: Mutex::default(),
        })
    }

    /// For the tenant, person or key that is counted under this name.
    pub(crate) async fn take(self: &Arc<Self>, name: &str) -> Result<Share, Problem> {
        let (user, own) = self.enter(name)?;
        // The tenant's own limit first: only requests within their share wait for the total.
        let permits = async {
            let own = own.acquire_owned().await.ok()?;
            Some((own, self.all.clone().acquire_owned().await.ok()?))
        };
        match timeout(self.bounds.wait, permits).await {
            Ok(Some(permits)) => Ok(Share {
                _user: user,
                _permits: permits,
            }),
            _ => Err(put_off()),
        }
    }

    fn enter(self: &Arc<Self>, name: &str) -> Result<(User, Arc<Semaphore>), Problem> {
        let Bounds { each, waiting, .. } = self.bounds;
        let mut tenants = self.lock();
        let entry = tenants.entry(name.to_owned()).or_insert_with(|| Entry {
            permits: Arc::new(Semaphore::new(each)),
            users: 0,
        });
        if entry.users >= each + waiting {
            return Err(put_off());
        }
        entry.users += 1;
        let user = User {
            shares: self.clone(),
            name: name.to_owned(),
        };
        Ok((user, entry.permits.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let mut tenants = self.shares.lock();
        if let Some(entry) = tenants.get_mut(&self.name) {
            entry.users -= 1;
            if entry.users == 0 {
                tenants.remove(&self.name);
            }
        }
    }
}

fn put_off() -> Problem {
    Problem::too_many("Too many concurrent requests for this tenant.", RETRY_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares() -> Arc<Shares> {
        Shares::new(Bounds {
            each: 2,
            all: 3,
            waiting: 1,
            wait: Duration::from_millis(50),
        })
    }

    #[tokio::test]
    async fn one_tenant_never_has_all_of_it() {
        let shares = shares();
        let first = shares.take("a").await.expect("within its share");
        let _second = shares.take("a").await.expect("within its share");
        assert!(shares.take("a").await.is_err(), "over its share");
        let _other = shares.take("b").await.expect("another tenant's part is free");
        assert!(shares.take("c").await.is_err(), "all of it is in use");
        drop(first);
        shares.take("c").await.expect("free again");
    }

    #[tokio::test]
    async fn only_so_many_wait_and_nothing_is_left_behind() {
        let shares = shares();
        let held = [shares.take("a").await, shares.take("a").await];
        let waiting = tokio::spawn({
            let shares = shares.clone();
            async move { shares.take("a").await.is_ok() }
        });
        tokio::task::yield_now().await;
        assert!(shares.enter("a").is_err(), "one waits already");
        drop(held);
        assert!(waiting.await.expect("no panic"), "what waits gets it");
        assert!(shares.lock().is_empty());
    }
}
