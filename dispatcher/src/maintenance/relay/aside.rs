//! Events of a source that are blocked: skipped until they are retried, with increasing delays. Pure.
//! Invariant: while an event is skipped, so is every later one of its key.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::backoff::Backoff;

const WAIT_MIN: Duration = Duration::from_millis(250);
const RETRY: Backoff = Backoff::new(WAIT_MIN, Duration::from_secs(5));
/// Entries not seen again for this long after their retry time are forgotten.
const KEPT: Duration = Duration::from_secs(60);
/// A tenant with more blocked strands than this is skipped as a whole.
const STRANDS_MAX: usize = 16;
/// Tenants tracked separately. Beyond that, those with the earliest retry time are forgotten.
const TENANTS_MAX: usize = 1_000;

/// The unit of ordering: the events of a key, or one event without a key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Strand {
    Key(String),
    Row(i64),
}

#[derive(Debug, Clone, Copy)]
struct Pause {
    until: Instant,
    backoff: Backoff,
}

impl Pause {
    fn next(before: Option<Self>, now: Instant) -> Self {
        let mut backoff = before.map_or(RETRY, |before| before.backoff);
        Self {
            until: now + backoff.delay(),
            backoff,
        }
    }
}

#[derive(Debug, Default)]
struct Tenant {
    whole: Option<Pause>,
    strands: HashMap<Strand, Pause>,
}

impl Tenant {
    fn latest(&self) -> Option<Instant> {
        self.strands
            .values()
            .chain(&self.whole)
            .map(|pause| pause.until)
            .max()
    }
}

#[derive(Debug, Default)]
pub(super) struct Aside(HashMap<String, Tenant>);

/// As arrays for a statement, keys with their tenants.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LeftOut {
    pub(super) tenants: Vec<String>,
    pub(super) rows: Vec<i64>,
    pub(super) key_tenants: Vec<String>,
    pub(super) keys: Vec<String>,
}

impl Aside {
    /// One strand, or all of a tenant.
    pub(super) fn put(&mut self, tenant: &str, strand: Option<Strand>, now: Instant) {
        let kept = self.0.entry(tenant.to_owned()).or_default();
        match strand {
            Some(strand) => {
                let pause = Pause::next(kept.strands.get(&strand).copied(), now);
                kept.strands.insert(strand, pause);
            }
            None => kept.whole = Some(Pause::next(kept.whole, now)),
        }
        if kept.strands.len() > STRANDS_MAX {
            kept.strands.clear();
            kept.whole = Some(Pause::next(kept.whole, now));
        }
        if self.0.len() > TENANTS_MAX {
            let first = self.0.iter().min_by_key(|(_, tenant)| tenant.latest());
            if let Some(first) = first.map(|(name, _)| name.clone()) {
                self.0.remove(&first);
            }
        }
    }

    /// All of a tenant, until its events may be accepted. Repeated calls for events of one statement count once.
    pub(super) fn put_whole(&mut self, tenant: &str, now: Instant) {
        let is_aside = |kept: &Tenant| kept.whole.is_some_and(|pause| pause.until > now);
        if !self.0.get(tenant).is_some_and(is_aside) {
            self.put(tenant, None, now);
        }
    }

    /// It was relayed.
    pub(super) fn forget(&mut self, tenant: &str, strand: &Strand) {
        if let Some(kept) = self.0.get_mut(tenant) {
            kept.strands.remove(strand);
        }
    }

    /// Whether something of the tenant was blocked recently.
    pub(super) fn knows(&self, tenant: &str) -> bool {
        self.0.get(tenant).is_some_and(|kept| kept.whole.is_some())
    }

    pub(super) fn left_out(&mut self, now: Instant) -> LeftOut {
        self.0
            .retain(|_, kept| kept.latest().is_some_and(|until| until + KEPT > now));
        let mut left_out = LeftOut::default();
        for (name, kept) in &self.0 {
            if kept.whole.is_some_and(|pause| pause.until > now) {
                left_out.tenants.push(name.clone());
            }
            for (strand, _) in kept.strands.iter().filter(|(_, pause)| pause.until > now) {
                match strand {
                    Strand::Row(n) => left_out.rows.push(*n),
                    Strand::Key(key) => {
                        left_out.key_tenants.push(name.clone());
                        left_out.keys.push(key.clone());
                    }
                }
            }
        }
        left_out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: usize) -> Strand {
        Strand::Key(format!("k{n}"))
    }

    #[test]
    fn what_is_aside_comes_back_later_each_time_until_it_went() {
        let (mut aside, mut now) = (Aside::default(), Instant::now());
        for wait in [250, 500, 1_000, 2_000, 4_000, 5_000, 5_000] {
            aside.put("acme", Some(key(1)), now);
            let wait = Duration::from_millis(wait);
            assert_eq!(aside.left_out(now + wait - Duration::from_millis(1)).keys, ["k1"]);
            now += wait;
            assert_eq!(aside.left_out(now), LeftOut::default());
        }
        aside.forget("acme", &key(1));
        aside.put("acme", Some(key(1)), now);
        assert_eq!(
            aside.left_out(now + WAIT_MIN),
            LeftOut::default(),
            "from the start"
        );
    }

    #[test]
    fn a_tenant_with_many_strands_is_left_out_as_a_whole_and_what_is_kept_is_bounded() {
        let (mut aside, now) = (Aside::default(), Instant::now());
        for n in 0..=STRANDS_MAX {
            aside.put("acme", Some(key(n)), now);
        }
        let left_out = aside.left_out(now);
        assert_eq!((left_out.tenants.len(), left_out.keys.len()), (1, 0));
        for n in 0..2 * TENANTS_MAX {
            aside.put(&format!("t{n}"), Some(Strand::Row(n as i64)), now);
        }
        assert!(aside.0.len() <= TENANTS_MAX);
        assert_eq!(aside.left_out(now + KEPT * 2), LeftOut::default());
        assert!(aside.0.is_empty());
    }
}
