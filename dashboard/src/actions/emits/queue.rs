//! Single emits waiting for a group. Tenants take turns, so that one with a thousand queued does not delay one with a
//! single emit.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use postrider_sender::Emitted;
use tokio::sync::{Notify, oneshot};

use super::OwnedEvent;
use crate::http::{problem::Problem, shares::Share};

type Reply = oneshot::Sender<Result<Emitted, Problem>>;

pub(super) struct Waiting {
    pub(super) event: OwnedEvent,
    pub(super) is_second_try: bool,
    reply: Reply,
    /// Of the queue, until the emit has a result.
    _share: Share,
}

impl Waiting {
    pub(super) fn new(event: OwnedEvent, reply: Reply, share: Share) -> Self {
        Self {
            event,
            is_second_try: false,
            reply,
            _share: share,
        }
    }

    /// The client may be gone.
    pub(super) fn reply(self, result: Result<Emitted, Problem>) {
        let _ = self.reply.send(result);
    }
}

/// Its length is bounded by the shares of the queued emits.
#[derive(Default)]
pub(super) struct Queue {
    lines: Mutex<Lines<Waiting>>,
    pushed: Notify,
}

impl Queue {
    pub(super) fn push(&self, waiting: Waiting) {
        let tenant = waiting.event.tenant.clone();
        self.lock().push(tenant, waiting);
        self.pushed.notify_one();
    }

    /// Waits for one, then takes all that are queued, up to `most`.
    pub(super) async fn take(&self, most: usize) -> Vec<Waiting> {
        loop {
            let (group, is_more) = {
                let mut lines = self.lock();
                (lines.take(most), !lines.turns.is_empty())
            };
            if is_more {
                self.pushed.notify_one();
            }
            if !group.is_empty() {
                return group;
            }
            self.pushed.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lines<Waiting>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Lines<T> {
    tenants: HashMap<String, VecDeque<T>>,
    /// Tenants with queued emits, each once; the first is next.
    turns: VecDeque<String>,
}

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Self {
            tenants: HashMap::new(),
            turns: VecDeque::new(),
        }
    }
}

impl<T> Lines<T> {
    fn push(&mut self, tenant: String, one: T) {
        let line = self.tenants.entry(tenant.clone()).or_default();
        if line.is_empty() {
            self.turns.push_back(tenant);
        }
        line.push_back(one);
    }

    fn take(&mut self, most: usize) -> Vec<T> {
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some(tenant) = self.turns.pop_front()
        {
            let Some(line) = self.tenants.get_mut(&tenant) else {
                continue;
            };
            taken.extend(line.pop_front());
            if line.is_empty() {
                self.tenants.remove(&tenant);
            } else {
                self.turns.push_back(tenant);
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_take_turns_and_each_keeps_its_order() {
        let mut lines = Lines::default();
        for n in 0..5 {
            lines.push("many".to_owned(), n);
        }
        lines.push("one".to_owned(), 10);
        lines.push("two".to_owned(), 20);
        lines.push("two".to_owned(), 21);
        assert_eq!(lines.take(4), [0, 10, 20, 1]);
        assert_eq!(lines.take(64), [21, 2, 3, 4]);
        assert!(lines.take(1).is_empty());
        assert!(lines.tenants.is_empty() && lines.turns.is_empty());
    }
}
