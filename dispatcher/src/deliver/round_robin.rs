//! A backlog from which endpoints are served in turn, so that one delivery of a quiet endpoint does not wait behind a
//! thousand of a busy one. Pure.

use std::collections::{HashMap, VecDeque};

use postrider_proto::EndpointId;

/// Invariant: `order` names each endpoint of `queues` once, and no queue is empty.
#[derive(Debug)]
pub(crate) struct RoundRobin<T> {
    queues: HashMap<EndpointId, VecDeque<T>>,
    order: VecDeque<EndpointId>,
}

impl<T> Default for RoundRobin<T> {
    fn default() -> Self {
        Self {
            queues: HashMap::new(),
            order: VecDeque::new(),
        }
    }
}

impl<T> RoundRobin<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub(crate) fn push(&mut self, endpoint: EndpointId, item: T) {
        let queue = self.queues.entry(endpoint).or_default();
        if queue.is_empty() {
            self.order.push_back(endpoint);
        }
        queue.push_back(item);
    }

    /// One item of the endpoint whose turn it is. Its remaining items wait for its next turn.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let endpoint = self.order.pop_front()?;
        let queue = self.queues.get_mut(&endpoint)?;
        let item = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&endpoint);
        } else {
            self.order.push_back(endpoint);
        }
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_endpoint_waits_for_one_item_of_each_other_and_not_for_their_backlogs() {
        let mut turns = RoundRobin::default();
        for item in 0..1_000 {
            turns.push(EndpointId(1), (1, item));
            turns.push(EndpointId(2), (2, item));
        }
        turns.push(EndpointId(3), (3, 0));
        let first: Vec<_> = std::iter::from_fn(|| turns.pop()).take(4).collect();
        assert_eq!(first, [(1, 0), (2, 0), (3, 0), (1, 1)]);
    }

    #[test]
    fn everything_comes_out_once_and_each_endpoint_in_its_order() {
        let mut turns = RoundRobin::default();
        for item in 0..100 {
            turns.push(EndpointId(item % 7), item);
        }
        let mut out: Vec<i32> = std::iter::from_fn(|| turns.pop()).collect();
        assert!(turns.is_empty());
        for endpoint in 0..7 {
            let of_one: Vec<i32> = out.iter().copied().filter(|item| item % 7 == endpoint).collect();
            assert!(of_one.is_sorted());
        }
        out.sort_unstable();
        assert_eq!(out, (0..100).collect::<Vec<_>>());
    }
}
