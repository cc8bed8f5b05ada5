//! A fair semaphore: divided between endpoints and tenants as in `division.rs`, and granted to waiting endpoints
//! round-robin, so that nobody waits behind another's crowd.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
};

use postrider_proto::EndpointId;
use tokio::sync::oneshot;

use crate::{
    deliver::division::{Division, Holder},
    lock::lock,
};

/// A limited amount of something, granted in turn.
#[derive(Clone)]
pub(crate) struct Fair(Arc<Mutex<Queue>>);

struct Queue {
    held: Division,
    /// Endpoints with waiters, in turn.
    turns: VecDeque<Holder>,
    waiting: HashMap<EndpointId, VecDeque<(usize, oneshot::Sender<FairShare>)>>,
}

/// A share held by an endpoint. Released on drop.
pub(crate) struct FairShare {
    fair: Fair,
    holder: Holder,
    amount: usize,
}

impl Fair {
    pub(crate) fn new(size: usize) -> Self {
        Self(Arc::new(Mutex::new(Queue {
            held: Division::new(size),
            turns: VecDeque::new(),
            waiting: HashMap::new(),
        })))
    }

    pub(crate) async fn acquire(&self, holder: Holder, amount: usize) -> FairShare {
        let granted = {
            let mut queue = lock(&self.0);
            if !queue.waiting.contains_key(&holder.endpoint) && queue.admits(holder, amount) {
                return self.grant(&mut queue, holder, amount);
            }
            queue.wait(holder, amount)
        };
        match granted.await {
            Ok(share) => share,
            // Can't happen: the sender lives in the queue, which we hold.
            Err(_) => self.grant(&mut lock(&self.0), holder, amount),
        }
    }

    fn grant(&self, queue: &mut Queue, holder: Holder, amount: usize) -> FairShare {
        queue.held.take(holder, amount);
        FairShare {
            fair: self.clone(),
            holder,
            amount,
        }
    }

    fn give_back(&self, holder: Holder, amount: usize) {
        let mut abandoned = Vec::new();
        {
            let mut queue = lock(&self.0);
            queue.held.give_back(holder, amount);
            // One grant per endpoint in turn, until a whole round granted nothing.
            let mut refused = 0;
            while refused < queue.turns.len() {
                let Some(holder) = queue.turns.pop_front() else {
                    break;
                };
                let next = queue.next_of(holder);
                if queue.waiting.contains_key(&holder.endpoint) {
                    queue.turns.push_back(holder);
                    refused += 1;
                }
                if let Some((amount, waiter)) = next {
                    refused = 0;
                    let share = self.grant(&mut queue, holder, amount);
                    // Dropped outside of the lock, which dropping acquires.
                    abandoned.extend(waiter.send(share).err());
                }
            }
        }
        drop(abandoned);
    }
}

impl Queue {
    /// A request larger than the total is admitted alone; it could never be granted otherwise.
    fn admits(&self, holder: Holder, amount: usize) -> bool {
        self.held.taken() == 0 || self.held.admits(holder, amount)
    }

    fn wait(&mut self, holder: Holder, amount: usize) -> oneshot::Receiver<FairShare> {
        let (granted, share) = oneshot::channel();
        let waiting = self.waiting.entry(holder.endpoint).or_default();
        if waiting.is_empty() {
            self.turns.push_back(holder);
        }
        waiting.push_back((amount, granted));
        share
    }

    /// The first waiter of an endpoint, if it can be granted now. Cancelled waiters are skipped.
    fn next_of(&mut self, holder: Holder) -> Option<(usize, oneshot::Sender<FairShare>)> {
        let waiting = self.waiting.get_mut(&holder.endpoint)?;
        waiting.retain(|(_, waiter)| !waiter.is_closed());
        let first = waiting.front().map(|(amount, _)| *amount);
        let next = match first {
            Some(amount) if self.admits(holder, amount) => {
                self.waiting.get_mut(&holder.endpoint)?.pop_front()
            }
            _ => None,
        };
        if self.waiting.get(&holder.endpoint).is_some_and(VecDeque::is_empty) {
            self.waiting.remove(&holder.endpoint);
        }
        next
    }
}

impl Drop for FairShare {
    fn drop(&mut self) {
        self.fair.give_back(self.holder, self.amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deliver::division::holder;
    use std::time::Duration;

    const BODY: usize = 250 * 1024;

    async fn now<T>(work: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(Duration::from_millis(20), work).await.ok()
    }

    /// As many as an endpoint gets when it releases none.
    async fn fill(fair: &Fair, holder: Holder) -> Vec<FairShare> {
        let mut shares = Vec::new();
        while let Some(share) = now(fair.acquire(holder, BODY)).await {
            shares.push(share);
        }
        shares
    }

    #[tokio::test]
    async fn no_number_of_bodies_that_stay_keeps_another_endpoint_from_its_own() {
        let fair = Fair::new(512 * BODY);
        let mut held = Vec::new();
        for lane in 0..60 {
            held.push(fill(&fair, holder(lane, lane / 2)).await);
            let other = now(fair.acquire(holder(-1, -1), BODY)).await;
            assert!(other.is_some(), "beside {lane} that hold all they get");
            if lane < 5 {
                let neighbour = now(fair.acquire(holder(-2, 0), BODY)).await;
                assert!(neighbour.is_some(), "of the tenant of the first two");
            }
        }
    }

    #[tokio::test]
    async fn all_that_wait_go_in_turn_as_it_is_given_back_and_none_is_lost() {
        let fair = Fair::new(4 * BODY);
        let mut held = fill(&fair, holder(1, 1)).await;
        let waiting: Vec<_> = (0..50)
            .map(|number| {
                let fair = fair.clone();
                tokio::spawn(
                    async move { drop(fair.acquire(holder(1 + number % 5, 1 + number % 2), BODY).await) },
                )
            })
            .collect();
        tokio::task::yield_now().await;
        let given_up = tokio::spawn({
            let fair = fair.clone();
            async move { drop(fair.acquire(holder(1, 1), BODY).await) }
        });
        tokio::task::yield_now().await;
        given_up.abort();
        held.clear();
        for one in waiting {
            now(one).await.expect("in turn").expect("no panic");
        }
        assert!(lock(&fair.0).held.is_empty());
        assert!(lock(&fair.0).waiting.is_empty() && lock(&fair.0).turns.is_empty());
    }

    #[tokio::test]
    async fn what_is_larger_than_the_whole_goes_alone() {
        let fair = Fair::new(BODY / 2);
        let share = now(fair.acquire(holder(1, 1), BODY)).await;
        assert!(share.is_some());
        assert!(now(fair.acquire(holder(2, 2), BODY)).await.is_none());
    }
}
