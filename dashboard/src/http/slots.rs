//! Slots shared by many callers: a total limit and a limit per holder.
//! Invariants: no holder takes all of them; memory is bounded by the number of slots.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

pub struct Slots<K> {
    total: usize,
    each: usize,
    taken: Mutex<Taken<K>>,
}

struct Taken<K> {
    total: usize,
    by_holder: HashMap<K, usize>,
}

/// One slot, until it is dropped.
pub(crate) struct Slot<K: Eq + Hash> {
    slots: Arc<Slots<K>>,
    /// None counts toward the total only.
    holder: Option<K>,
}

impl<K: Eq + Hash + Clone> Slots<K> {
    pub(crate) fn new(total: usize, each: usize) -> Arc<Self> {
        let taken = Taken {
            total: 0,
            by_holder: HashMap::new(),
        };
        Arc::new(Self {
            total,
            each,
            taken: Mutex::new(taken),
        })
    }

    /// None if all slots, or all of this holder's, are taken.
    pub(crate) fn take(self: &Arc<Self>, holder: Option<K>) -> Option<Slot<K>> {
        let mut taken = self.lock();
        if taken.total >= self.total {
            return None;
        }
        if let Some(holder) = &holder {
            let own = taken.by_holder.entry(holder.clone()).or_insert(0);
            if *own >= self.each {
                return None;
            }
            *own += 1;
        }
        taken.total += 1;
        Some(Slot {
            slots: self.clone(),
            holder,
        })
    }
}

impl<K> Slots<K> {
    fn lock(&self) -> MutexGuard<'_, Taken<K>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        let mut taken = self.slots.lock();
        taken.total = taken.total.saturating_sub(1);
        let Some(holder) = &self.holder else { return };
        if let Some(own) = taken.by_holder.get_mut(holder) {
            *own -= 1;
            if *own == 0 {
                taken.by_holder.remove(holder);
            }
        }
    }
}

#[cfg(test)]
impl<K> Slots<K> {
    pub(crate) fn taken(&self) -> (usize, usize) {
        let taken = self.lock();
        (taken.total, taken.by_holder.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_holder_takes_all_slots_and_nothing_is_remembered_of_those_given_back() {
        let slots = Slots::new(5, 3);
        let take = |holder| slots.take(Some(holder));
        let greedy: Vec<_> = (0..9).filter_map(|_| take("greedy")).collect();
        assert_eq!(greedy.len(), 3);
        let (other, unnamed) = (take("other"), slots.take(None));
        assert!(other.is_some() && unnamed.is_some());
        assert!(take("late").is_none(), "all are taken");
        assert_eq!(slots.taken(), (5, 2), "a refusal leaves nothing behind");
        drop((greedy, other, unnamed));
        assert_eq!(slots.taken(), (0, 0));
        assert!(take("greedy").is_some());
    }
}
