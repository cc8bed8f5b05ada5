//! Ids and ordering keys that another transaction keeps locked: an emit that needs one would delay its whole group.
//! Invariant: an entry is dropped as soon as an emit of it succeeds, or after a while; the number of entries is
//! bounded.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::OwnedEvent;

const KEPT: Duration = Duration::from_secs(10);
/// Per tenant. With more than this, all ids and keys of the tenant count as contended.
const LOCKS_MAX: usize = 8;
const TENANTS_MAX: usize = 1_000;

#[derive(Default)]
pub(super) struct Contended(Mutex<HashMap<String, HashMap<Lock, Instant>>>);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Lock {
    Id(String),
    Key(String),
}

impl Contended {
    pub(super) fn is_contended(&self, event: &OwnedEvent) -> bool {
        if !event.takes_lock() {
            return false;
        }
        let mut tenants = self.lock();
        let Some(noted) = tenants.get_mut(&event.tenant) else {
            return false;
        };
        noted.retain(|_, since| since.elapsed() < KEPT);
        if noted.is_empty() {
            tenants.remove(&event.tenant);
            return false;
        }
        noted.len() >= LOCKS_MAX || locks(event).any(|lock| noted.contains_key(&lock))
    }

    pub(super) fn note(&self, event: &OwnedEvent) {
        let mut tenants = self.lock();
        if tenants.len() >= TENANTS_MAX && !tenants.contains_key(&event.tenant) {
            tenants.retain(|_, noted| noted.values().any(|since| since.elapsed() < KEPT));
            if tenants.len() >= TENANTS_MAX {
                return;
            }
        }
        let noted = tenants.entry(event.tenant.clone()).or_default();
        for lock in locks(event) {
            if noted.len() < LOCKS_MAX || noted.contains_key(&lock) {
                noted.insert(lock, Instant::now());
            }
        }
    }

    pub(super) fn forget(&self, event: &OwnedEvent) {
        let mut tenants = self.lock();
        if let Some(noted) = tenants.get_mut(&event.tenant) {
            for lock in locks(event) {
                noted.remove(&lock);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, HashMap<Lock, Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn locks(event: &OwnedEvent) -> impl Iterator<Item = Lock> {
    let id = event.id.clone().map(Lock::Id);
    let key = event.ordering_key.clone().map(Lock::Key);
    id.into_iter().chain(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(tenant: &str, id: Option<&str>, key: Option<&str>) -> OwnedEvent {
        OwnedEvent {
            tenant: tenant.to_owned(),
            type_name: "a".to_owned(),
            data: "{}".to_owned(),
            id: id.map(str::to_owned),
            version: None,
            ordering_key: key.map(str::to_owned),
            trace: None,
            checked: None,
        }
    }

    #[test]
    fn what_is_held_is_known_by_its_tenant_until_it_gets_through() {
        let contended = Contended::default();
        let held = event("a", None, Some("k"));
        contended.note(&held);
        assert!(contended.is_contended(&held));
        assert!(contended.is_contended(&event("a", Some("x"), Some("k"))));
        assert!(!contended.is_contended(&event("a", Some("k"), None)));
        assert!(!contended.is_contended(&event("b", None, Some("k"))));
        assert!(!contended.is_contended(&event("a", None, None)));
        contended.forget(&held);
        assert!(!contended.is_contended(&held));
    }

    #[test]
    fn a_tenant_with_many_is_not_trusted_with_any() {
        let contended = Contended::default();
        for n in 0..100 {
            contended.note(&event("a", Some(&n.to_string()), None));
        }
        assert!(contended.is_contended(&event("a", None, Some("another"))));
        assert!(!contended.is_contended(&event("a", None, None)));
        assert!(!contended.is_contended(&event("b", None, Some("another"))));
    }
}
