//! Rows in and out of a lane: what the tail offers, what is read again from disk, and what must not be taken twice.

use super::*;

impl Lane {
    /// A row that the tail saw.
    pub(crate) fn offer(&mut self, delivery: QueuedDelivery) {
        if let Some(busy) = self
            .busy
            .get_mut(&delivery.event)
            .filter(|busy| delivery.attempt < busy.number)
        {
            // A manual retry may have moved it here from `retries` while it was attempted.
            busy.queued = true;
            return;
        }
        if self.endpoint.state == EndpointState::Deleted {
            return;
        }
        if self.floor.is_some_and(|floor| delivery.event > floor) {
            return;
        }
        if self.is_withdrawn(&delivery) {
            return self.skip(delivery.event);
        }
        // A manual retry was requested: the copy read from `retries` is replaced.
        if delivery.attempt > 0 {
            self.due.retain(|waiting| waiting.event != delivery.event);
        }
        match self.ordering_key_of(&delivery) {
            Some(key) if self.active.contains(&key) || self.key_lookups.contains(&key) => {
                self.skip(delivery.event)
            }
            None if delivery.replay.is_some() && self.replays.len() < REPLAYS_MAX => {
                self.replays.push_back(delivery)
            }
            _ if self.free_slots() == 0 => self.lower_floor(delivery.event.pred()),
            Some(key) => {
                self.key_lookups.insert(key);
                self.skip(delivery.event);
            }
            None => self.fresh.push_back(delivery),
        }
    }

    pub(super) fn skip(&mut self, event: EventId) {
        self.lowest_skipped = Some(self.lowest_skipped.map_or(event, |lowest| lowest.min(event)));
    }

    /// Just below the lowest known row of the queue.
    pub(super) fn below_all(&self) -> Option<EventId> {
        let waiting = self.fresh.iter().chain(&self.replays).chain(&self.heads);
        let waiting = waiting.map(|delivery| delivery.event);
        let busy = self.busy.iter().filter(|(_, busy)| busy.queued);
        let rows = waiting
            .chain(busy.map(|(event, _)| *event))
            .chain(self.lowest_skipped);
        rows.map(EventId::pred).chain(self.floor).min()
    }

    /// The tail left out this endpoint's rows above an id.
    pub(crate) fn cut(&mut self, last: EventId) {
        self.lower_floor(last);
    }

    pub(super) fn lower_floor(&mut self, floor: EventId) {
        let floor = self.floor.map_or(floor, |old| old.min(floor));
        self.floor = Some(floor);
        self.fresh.retain(|delivery| delivery.event <= floor);
        self.replays.retain(|delivery| delivery.event <= floor);
    }

    /// An older snapshot still shows a delivery that is in flight or just recorded.
    pub(super) fn is_stale(&self, delivery: &QueuedDelivery) -> bool {
        self.busy
            .get(&delivery.event)
            .is_some_and(|busy| delivery.attempt < busy.number)
    }

    /// Whether its replay is being withdrawn. Everything is read again afterwards.
    pub(super) fn is_withdrawn(&self, delivery: &QueuedDelivery) -> bool {
        !self.withdrawing.is_empty()
            && delivery
                .replay
                .as_deref()
                .is_some_and(|replay| self.withdrawing.iter().any(|one| one == replay))
    }

    /// Drops queued deliveries of cancelled replays from memory and returns what is to be withdrawn: all but those in
    /// flight.
    pub(crate) fn withdraw(&mut self, now: DateTime<Utc>) -> Option<Withdrawal> {
        if self.endpoint.cancelled.is_empty() {
            return None;
        }
        let under_way = !self.withdrawing.is_empty();
        self.withdrawing.clone_from(&self.endpoint.cancelled);
        self.reload(now);
        if under_way {
            self.withdraw_again = true;
            return None;
        }
        let busy = self.busy.iter();
        let attempted = busy.filter(|(_, busy)| busy.stage != Stage::Recorded);
        Some(Withdrawal {
            endpoint: self.endpoint.id,
            shard: self.endpoint.shard,
            epoch: self.epoch,
            replays: self.withdrawing.clone(),
            attempted: attempted.map(|(event, busy)| (*event, busy.number)).collect(),
        })
    }

    /// The withdrawal is complete, and no read still to be applied can show the rows in the queue.
    pub(crate) fn withdrawn(&mut self, now: DateTime<Utc>) -> Option<Withdrawal> {
        self.withdrawing.clear();
        // A retry that is put back is due when it was.
        self.search_retries();
        if std::mem::take(&mut self.withdraw_again) {
            return self.withdraw(now);
        }
        self.reload(now);
        None
    }

    /// What to read from the queue, when the lane is spilled and at most half full.
    pub(crate) fn wants_refill(&self) -> Option<Refill> {
        let floor = self.floor.filter(|_| !self.is_paused())?;
        let free = self.free_slots();
        (free * 2 > self.buffer_size()).then_some(Refill { floor, limit: free })
    }

    /// The rows of a refill, ascending, from a snapshot whose tail was applied before.
    pub(crate) fn refilled(&mut self, asked: Refill, rows: Vec<QueuedDelivery>) {
        // The tail of the same read may have lowered the floor: then these rows start in the wrong place.
        if self.floor != Some(asked.floor) || self.is_paused() {
            return;
        }
        self.floor = match rows.last() {
            Some(last) if rows.len() >= asked.limit => Some(last.event),
            _ => None,
        };
        for delivery in rows {
            self.offer(delivery);
        }
    }

    /// Whether keys wait for their first delivery to be looked up.
    pub(crate) fn wants_keys(&self) -> bool {
        !self.key_lookups.is_empty() && !self.is_paused() && self.heads.len() * 2 <= self.buffer_size()
    }

    /// A read of these keys begins now. They are unmarked here, so that any change the read may not see marks them
    /// again.
    pub(crate) fn key_read_begins(&mut self) -> Vec<i64> {
        let keys: Vec<i64> = self.key_lookups.iter().copied().take(KEYS_MAX).collect();
        self.key_lookups.retain(|key| keys.binary_search(key).is_err());
        keys
    }

    /// The read did not take place.
    pub(crate) fn requeue_keys(&mut self, keys: Vec<i64>) {
        self.key_lookups.extend(keys);
    }

    /// The first deliveries of the requested keys, where they are fresh. If a key's first delivery is a retry it is
    /// not included: it comes when due, and the key is looked up again when it has ended.
    pub(crate) fn keys_read(&mut self, heads: Vec<QueuedDelivery>) {
        for delivery in heads {
            let Some(key) = self.ordering_key_of(&delivery) else {
                continue;
            };
            if self.is_withdrawn(&delivery) {
                continue;
            }
            if self.is_stale(&delivery) {
                self.key_lookups.insert(key);
            } else if !self.is_paused() && self.active.insert(key) {
                self.heads.push_back(delivery);
            }
        }
    }

    /// Which rows of `retries` to read, when some are due and there is buffer space for them.
    pub(crate) fn wants_due(&self, now: DateTime<Utc>) -> Option<DueRead> {
        let even_later = self.action() != Action::Send;
        let due = self.next_due.is_some_and(|at| at <= now || even_later);
        let free = self.buffer_size().saturating_sub(self.due.len());
        let limit = free + self.due.len() + self.busy.len();
        let asked = DueRead {
            limit,
            even_later,
            from: self.due_from,
        };
        (due && !self.is_paused() && free * 2 > self.buffer_size()).then_some(asked)
    }

    /// When `retries` are to be read again; not while there is no space for due rows.
    pub(crate) fn next_due(&self) -> Option<DateTime<Utc>> {
        let due = self.next_due?;
        self.wants_due(due).map(|_| due)
    }

    /// A read of `retries` begins now.
    pub(crate) fn due_read_begins(&mut self) {
        self.due_since_read = None;
    }

    /// The requested rows of `retries`. Rows being attempted are included, so that nothing is due before the first
    /// except what was recorded meanwhile.
    pub(crate) fn due_read(&mut self, DueRows { rows, first, later }: DueRows) {
        let earliest = |a: Option<DateTime<Utc>>, b: Option<DateTime<Utc>>| a.into_iter().chain(b).min();
        self.next_due = earliest(later, self.due_since_read);
        self.due_from = earliest(first, self.due_since_read).unwrap_or(LATEST);
        if self.is_paused() {
            return;
        }
        let waiting: HashSet<EventId> = self.due.iter().map(|delivery| delivery.event).collect();
        for delivery in rows {
            if !self.is_stale(&delivery) && !waiting.contains(&delivery.event) {
                self.due.push_back(delivery);
            }
        }
    }

    /// The result of an attempt is unknown: its row may be among the retries with any due time.
    pub(crate) fn search_retries(&mut self) {
        self.due_from = EARLIEST;
        // Also covers a read in progress that started at a later due time.
        self.due_since_read = Some(EARLIEST);
    }

    /// Everything is read again from the lowest known row; attempts in flight or being recorded stay known.
    pub(crate) fn reload(&mut self, now: DateTime<Utc>) {
        if let Some(floor) = self.below_all() {
            self.lower_floor(floor);
        }
        self.lowest_skipped = None;
        self.due.clear();
        self.heads.clear();
        self.key_lookups.clear();
        self.active = self
            .busy
            .values()
            .filter(|busy| busy.stage != Stage::Recorded)
            .filter_map(|busy| busy.key)
            .collect();
        self.next_due = Some(now);
    }
}
