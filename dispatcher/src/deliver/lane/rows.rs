//! The rows a lane knows: what the tail offers, what it reads again from disk, and what it must not take twice.

use super::*;

impl Lane {
    /// A row that the tail saw.
    pub(crate) fn offer(&mut self, delivery: QueuedDelivery) {
        if let Some(busy) = self
            .busy
            .get_mut(&delivery.event)
            .filter(|busy| delivery.attempt < busy.number)
        {
            // A person may have moved it here from `retries` while it was attempted.
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
            return self.pass_over(delivery.event);
        }
        // A person asked for a waiting retry to be sent now: the copy that was read from `retries` gives way.
        if delivery.attempt > 0 {
            self.due.retain(|waiting| waiting.event != delivery.event);
        }
        match self.line_of(&delivery) {
            Some(key) if self.active.contains(&key) || self.look.contains(&key) => {
                self.pass_over(delivery.event)
            }
            None if delivery.replay.is_some() && self.replays.len() < REPLAYS_MAX => {
                self.replays.push_back(delivery)
            }
            _ if self.room() == 0 => self.lower_floor(delivery.event.pred()),
            Some(key) => {
                self.look.insert(key);
                self.pass_over(delivery.event);
            }
            None => self.fresh.push_back(delivery),
        }
    }

    pub(super) fn pass_over(&mut self, event: EventId) {
        self.passed_over = Some(self.passed_over.map_or(event, |lowest| lowest.min(event)));
    }

    /// Below every row of the queue that is known, when there is one.
    pub(super) fn below_all(&self) -> Option<EventId> {
        let waiting = self.fresh.iter().chain(&self.replays).chain(&self.heads);
        let waiting = waiting.map(|delivery| delivery.event);
        let busy = self.busy.iter().filter(|(_, busy)| busy.queued);
        let rows = waiting
            .chain(busy.map(|(event, _)| *event))
            .chain(self.passed_over);
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

    /// An older snapshot still shows a delivery that is on the wire or just recorded.
    pub(super) fn is_stale(&self, delivery: &QueuedDelivery) -> bool {
        self.busy
            .get(&delivery.event)
            .is_some_and(|busy| delivery.attempt < busy.number)
    }

    /// Whether it is being taken back. Everything is read again afterwards.
    pub(super) fn is_withdrawn(&self, delivery: &QueuedDelivery) -> bool {
        !self.withdrawing.is_empty()
            && delivery
                .replay
                .as_deref()
                .is_some_and(|replay| self.withdrawing.iter().any(|one| one == replay))
    }

    /// Lets go of what is in line of cancelled replays, and says what is to be taken back: all but what is on the wire.
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

    /// They are where they were, and no read that is still to be applied can show them in line.
    pub(crate) fn withdrawn(&mut self, now: DateTime<Utc>) -> Option<Withdrawal> {
        self.withdrawing.clear();
        // A retry that goes back is due when it was.
        self.search_retries();
        if std::mem::take(&mut self.withdraw_again) {
            return self.withdraw(now);
        }
        self.reload(now);
        None
    }

    /// What to read from the queue, when the lane is spilled and half empty.
    pub(crate) fn wants_refill(&self) -> Option<Refill> {
        let floor = self.floor.filter(|_| !self.is_paused())?;
        let room = self.room();
        (room * 2 > self.buffer_size()).then_some(Refill { floor, limit: room })
    }

    /// The rows of a refill, ascending, from a snapshot whose tail was applied before.
    pub(crate) fn refilled(&mut self, asked: Refill, rows: Vec<QueuedDelivery>) {
        // The tail of the same read may have lowered the floor: then these rows begin in the wrong place.
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

    /// Whether keys wait to have their first delivery looked up.
    pub(crate) fn wants_keys(&self) -> bool {
        !self.look.is_empty() && !self.is_paused() && self.heads.len() * 2 <= self.buffer_size()
    }

    /// A read of these keys begins now. They are no longer marked: whatever happens to one from here on, which the read
    /// may not see, marks it again.
    pub(crate) fn key_read_begins(&mut self) -> Vec<i64> {
        let keys: Vec<i64> = self.look.iter().copied().take(KEYS_MAX).collect();
        self.look.retain(|key| keys.binary_search(key).is_err());
        keys
    }

    /// The read did not take place.
    pub(crate) fn look_again(&mut self, keys: Vec<i64>) {
        self.look.extend(keys);
    }

    /// The first deliveries of the keys asked for, where they are fresh. A key whose first one is a retry is not among
    /// them: that one comes when it is due, and the key is looked at again when it has ended.
    pub(crate) fn keys_read(&mut self, heads: Vec<QueuedDelivery>) {
        for delivery in heads {
            let Some(key) = self.line_of(&delivery) else {
                continue;
            };
            if self.is_withdrawn(&delivery) {
                continue;
            }
            if self.is_stale(&delivery) {
                self.look.insert(key);
            } else if !self.is_paused() && self.active.insert(key) {
                self.heads.push_back(delivery);
            }
        }
    }

    /// Which rows of `retries` to read, when some are due and there is room for them.
    pub(crate) fn wants_due(&self, now: DateTime<Utc>) -> Option<DueRead> {
        let even_later = self.action() != Action::Send;
        let due = self.next_due.is_some_and(|at| at <= now || even_later);
        let room = self.buffer_size().saturating_sub(self.due.len());
        let limit = room + self.due.len() + self.busy.len();
        let asked = DueRead {
            limit,
            even_later,
            from: self.due_from,
        };
        (due && !self.is_paused() && room * 2 > self.buffer_size()).then_some(asked)
    }

    /// When `retries` are to be read again; not while there is no room for what is due.
    pub(crate) fn next_due(&self) -> Option<DateTime<Utc>> {
        let due = self.next_due?;
        self.wants_due(due).map(|_| due)
    }

    /// A read of `retries` begins now.
    pub(crate) fn due_read_begins(&mut self) {
        self.due_since_read = None;
    }

    /// The rows of `retries` that were asked for. Those that are being attempted are among them, so that nothing waits before
    /// the first but what was recorded meanwhile.
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

    /// Nobody knows what became of a result: its row may be among the retries, due whenever.
    pub(crate) fn search_retries(&mut self) {
        self.due_from = EARLIEST;
        // Also when a read is under way that began further up.
        self.due_since_read = Some(EARLIEST);
    }

    /// Everything is read again, from the lowest row that is known; what is on the wire or being recorded stays known.
    pub(crate) fn reload(&mut self, now: DateTime<Utc>) {
        if let Some(floor) = self.below_all() {
            self.lower_floor(floor);
        }
        self.passed_over = None;
        self.due.clear();
        self.heads.clear();
        self.look.clear();
        self.active = self
            .busy
            .values()
            .filter(|busy| busy.stage != Stage::Recorded)
            .filter_map(|busy| busy.key)
            .collect();
        self.next_due = Some(now);
    }
}
