//! Divides a limited resource, such as in-flight capacity or memory, between endpoints and their tenants by dynamic
//! thresholds. Pure.
//!
//! - An endpoint may take more only while it holds less than the free amount minus its tenant's share and a reserve.
//!   Alone it gets over a quarter; the more others hold, the smaller its share.
//! - The reserve is for endpoints that hold nothing, and its last half for tenants that hold nothing.
//!
//! However much some endpoints or tenants hold without releasing, every other one can get its first unit.

use std::{collections::HashMap, hash::Hash};

use postrider_proto::{EndpointId, TenantId};

/// The reserve is this fraction of the total.
const RESERVE_PART: usize = 8;

/// The endpoint and tenant that hold a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) endpoint: EndpointId,
    pub(crate) tenant: TenantId,
}

#[derive(Debug, Default)]
pub(crate) struct Division {
    size: usize,
    taken: usize,
    by_endpoint: HashMap<EndpointId, usize>,
    by_tenant: HashMap<TenantId, usize>,
}

impl Division {
    pub(crate) fn new(size: usize) -> Self {
        Self {
            size,
            ..Self::default()
        }
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn taken(&self) -> usize {
        self.taken
    }

    pub(crate) fn free(&self) -> usize {
        self.size.saturating_sub(self.taken)
    }

    pub(crate) fn of_tenant(&self, holder: Holder) -> usize {
        self.by_tenant.get(&holder.tenant).copied().unwrap_or(0)
    }

    /// Whether this holder may take this much more now.
    pub(crate) fn admits(&self, holder: Holder, amount: usize) -> bool {
        let of_endpoint = self.by_endpoint.get(&holder.endpoint).copied().unwrap_or(0);
        let of_tenant = self.of_tenant(holder);
        let reserve = self.size / RESERVE_PART;
        let left_after = |kept: usize| self.free().saturating_sub(kept);
        of_endpoint + amount <= left_after(reserve + of_tenant)
            || of_endpoint == 0 && amount <= left_after(reserve / 2)
            || of_tenant == 0 && amount <= self.free()
    }

    pub(crate) fn take(&mut self, holder: Holder, amount: usize) {
        self.taken += amount;
        *self.by_endpoint.entry(holder.endpoint).or_default() += amount;
        *self.by_tenant.entry(holder.tenant).or_default() += amount;
    }

    pub(crate) fn give_back(&mut self, holder: Holder, amount: usize) {
        self.taken = self.taken.saturating_sub(amount);
        lower(&mut self.by_endpoint, holder.endpoint, amount);
        lower(&mut self.by_tenant, holder.tenant, amount);
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.taken == 0 && self.by_endpoint.is_empty() && self.by_tenant.is_empty()
    }
}

fn lower<K: Hash + Eq>(held: &mut HashMap<K, usize>, key: K, amount: usize) {
    if let Some(count) = held.get_mut(&key) {
        *count = count.saturating_sub(amount);
        if *count == 0 {
            held.remove(&key);
        }
    }
}

#[cfg(test)]
pub(crate) fn holder(endpoint: i32, tenant: i32) -> Holder {
    Holder {
        endpoint: EndpointId(endpoint),
        tenant: TenantId(tenant),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As much as it gets when it releases nothing.
    fn fill(division: &mut Division, holder: Holder, amount: usize) -> usize {
        let before = division.taken();
        while division.admits(holder, amount) {
            division.take(holder, amount);
        }
        division.taken() - before
    }

    #[test]
    fn whoever_holds_nothing_gets_a_piece_beside_any_that_give_nothing_back() {
        let mut division = Division::new(2048);
        assert_eq!(fill(&mut division, holder(0, 0), 1), 598, "alone");
        for hog in 1..250 {
            fill(&mut division, holder(hog, hog), 1);
            let other = holder(-1, -1);
            assert!(division.admits(other, 1), "beside {hog}");
        }
        let mut division = Division::new(2048);
        for hog in 0..250 {
            fill(&mut division, holder(hog, 0), 1);
            assert!(division.admits(holder(-1, -1), 1), "beside one tenant's {hog}");
            assert!(
                hog > 100 || division.admits(holder(-1, 0), 1),
                "of the same tenant, beside {hog}"
            );
        }
        assert!(division.free() >= 2048 / RESERVE_PART / 2);
    }

    #[test]
    fn everything_comes_back() {
        let mut division = Division::new(100);
        for n in 0..20 {
            division.take(holder(n % 3, n % 2), 2);
        }
        for n in 0..20 {
            division.give_back(holder(n % 3, n % 2), 2);
        }
        assert!(division.is_empty());
    }
}
