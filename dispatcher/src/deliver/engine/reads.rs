//! The engine's side of reading: what a cycle requests, and how its results are applied.

use super::*;

impl Engine {
    /// Requests a read of the tail and of everything the lanes want. One cycle at a time.
    pub(crate) fn read_if_idle(&mut self) {
        if self.state.reading {
            return;
        }
        let now = self.clock.now();
        let state = &mut self.state;
        let wanted = !state.taken.is_empty()
            || !state.refill_queue.is_empty()
            || !state.found.is_empty()
            || state.reload
            || state.due.first().is_some_and(|(at, _)| *at <= now);
        let mut load: Vec<EndpointId> = state.found.keys().copied().take(READS_MAX).collect();
        // All lanes in one cycle: its snapshot is published as the one whose settings are applied.
        let reload = std::mem::take(&mut state.reload);
        if reload {
            load.extend(state.lanes.keys());
        }
        let mut cycle = Cycle {
            may_wait: state.may_wait && !wanted,
            number: state.reads + 1,
            owned: state
                .owned
                .keys()
                .copied()
                .filter(|shard| !state.taken.contains(shard))
                .collect(),
            taken: std::mem::take(&mut state.taken),
            load,
            forget: std::mem::take(&mut state.forget),
            ..Cycle::default()
        };
        while cycle.refills.len() < READS_MAX
            && cycle.keys.len() < KEY_READS_MAX
            && let Some(id) = state.refill_queue.pop_front()
        {
            state.in_refill_queue.remove(&id);
            let Some(lane) = state.lanes.get_mut(&id) else {
                continue;
            };
            cycle
                .refills
                .extend(lane.wants_refill().map(|refill| (id, refill)));
            if lane.wants_keys() {
                cycle.keys.push((id, lane.key_read_begins()));
            }
        }
        for (_, id) in state.due.iter().take_while(|(at, _)| *at <= now) {
            if cycle.due.len() == READS_MAX {
                break;
            }
            if let Some(lane) = state.lanes.get_mut(id)
                && let Some(asked) = lane.wants_due(now)
            {
                lane.due_read_begins();
                cycle.due.push((*id, asked));
            }
        }
        let (taken, load) = (cycle.taken.clone(), cycle.load.clone());
        match self.cycles.try_send(cycle) {
            Ok(()) => {
                state.reads += 1;
                state.reading = true;
                state.begun = taken;
                state.loading = load;
            }
            Err(mpsc::error::TrySendError::Full(cycle) | mpsc::error::TrySendError::Closed(cycle)) => {
                state.taken = cycle.taken;
                state.forget = cycle.forget;
                state.reload = reload;
                for (id, keys) in cycle.keys {
                    self.change_lane(id, |lane| lane.requeue_keys(keys));
                }
                for (id, _) in cycle.refills {
                    self.settle(id);
                }
            }
        }
    }

    /// Returns the number of rows when the message ends a cycle.
    pub(crate) fn apply(&mut self, message: ReaderMessage) -> Option<usize> {
        match message {
            ReaderMessage::Sending { stopped } => {
                if self.switch.set(!stopped) {
                    tracing::info!("sending is {}", if stopped { "stopped" } else { "on" });
                }
            }
            ReaderMessage::Endpoints(rows) => {
                for row in rows {
                    self.introduce(&row);
                }
            }
            ReaderMessage::Page { rows, cut } => self.take_page(rows, cut),
            ReaderMessage::Refilled {
                endpoint,
                asked,
                rows,
            } => {
                self.note_missed(endpoint, &rows);
                self.change_lane(endpoint, |lane| lane.refilled(asked, rows));
            }
            ReaderMessage::Due { endpoint, due } => self.change_lane(endpoint, |lane| lane.due_read(due)),
            ReaderMessage::Keys { endpoint, heads } => {
                self.change_lane(endpoint, |lane| lane.keys_read(heads));
            }
            ReaderMessage::Done {
                number,
                tailed,
                queue_read,
                rows,
                settings,
            } => {
                self.state.reading = false;
                if queue_read {
                    self.vital.queue_was_read();
                }
                self.forget_recorded(number);
                self.resume_after_withdrawals(number);
                self.after_loading();
                if tailed {
                    self.check_sweep_hits(number);
                }
                if let Some(snapshot) = settings {
                    self.state.unquiet = Some(snapshot.clone());
                    self.applied.send_replace(Some(snapshot));
                }
                return Some(rows);
            }
            ReaderMessage::Lost => {
                self.state.reading = false;
                self.reload();
                return Some(0);
            }
        }
        None
    }

    /// Once no paused endpoint has an attempt in flight or unrecorded, its deliveries are what the tables say.
    pub(super) fn report_quiet(&mut self) {
        if self.state.unquiet.is_none() {
            return;
        }
        let lanes = &self.state.lanes;
        self.state
            .ending
            .retain(|id| lanes.get(id).is_some_and(Lane::is_ending));
        if self.state.ending.is_empty() {
            self.quiet.send_replace(self.state.unquiet.take());
        }
    }

    fn change_lane(&mut self, id: EndpointId, change: impl FnOnce(&mut Lane)) {
        if let Some(lane) = self.state.lanes.get_mut(&id) {
            change(lane);
        }
        self.settle(id);
    }

    fn take_page(&mut self, rows: Vec<QueueRow>, cut: Option<(EndpointId, EventId)>) {
        let mut touched = HashSet::new();
        for row in rows {
            let Some(lane) = self.state.lanes.get_mut(&row.endpoint) else {
                // Without a lane the row is treated as found work: the reader loads the endpoint's settings.
                if self.state.owned.contains_key(&row.shard) {
                    self.found(Found {
                        endpoint: row.endpoint,
                        shard: row.shard,
                        first: Some(row.delivery.event),
                        next_due: None,
                    });
                }
                continue;
            };
            lane.offer(row.delivery);
            if touched.insert(row.endpoint) && lane.endpoint().state == EndpointState::Deleted {
                let _ = self.deleted.send(row.endpoint);
            }
        }
        if let Some((endpoint, last)) = cut
            && let Some(lane) = self.state.lanes.get_mut(&endpoint)
        {
            lane.cut(last);
        }
        for endpoint in touched {
            self.settle(endpoint);
        }
    }

    /// Creates a lane for an endpoint without one, or applies new settings.
    pub(super) fn introduce(&mut self, row: &EndpointRow) {
        let id = row.id;
        if !self.state.owned.contains_key(&row.shard) {
            // Lost while it was read. If the shard comes back, the endpoint is loaded again before its first row.
            self.state.found.remove(&id);
            self.state.forget.push(id);
            return;
        }
        let now = self.clock.now();
        let endpoint = match row.open(&self.vault, &self.settings) {
            Ok(endpoint) => Arc::new(endpoint),
            Err(error) => {
                tracing::error!(endpoint = %id, %error, "endpoint settings are unusable; its deliveries stay queued");
                // The previous settings must not be used either: they may have been replaced because a secret leaked.
                if let Some(lane) = self.state.lanes.remove(&id) {
                    lane.endpoint().stop();
                    self.settle(id);
                }
                // It stays known, so that the reader reports new settings.
                self.state.found.remove(&id);
                self.state.unusable.insert(id, row.shard);
                return;
            }
        };
        let was_unusable = self.state.unusable.remove(&id).is_some();
        let deleted = endpoint.state == EndpointState::Deleted;
        match self.state.lanes.get_mut(&id) {
            Some(lane) => {
                lane.change(endpoint, now);
                if lane.is_ending() {
                    self.state.ending.insert(id);
                }
            }
            None => {
                let Some(epoch) = self.state.owned.get(&endpoint.shard) else {
                    return;
                };
                self.state.lanes.insert(id, Lane::new(endpoint, *epoch));
                self.state.forget.retain(|gone| *gone != id);
            }
        }
        if let Some(found) = self.state.found.remove(&id) {
            self.found(found);
        }
        // Rows that arrived meanwhile were not kept.
        if was_unusable {
            self.survey(vec![row.shard], Reason::Taken);
        }
        if deleted {
            let _ = self.deleted.send(id);
        }
        self.withdraw(id);
        self.settle(id);
    }

    /// Searches the shards that this cycle began to tail for older rows. Requested endpoints that were not found no
    /// longer exist.
    pub(super) fn after_loading(&mut self) {
        for id in std::mem::take(&mut self.state.loading) {
            self.state.found.remove(&id);
        }
        let begun = std::mem::take(&mut self.state.begun);
        if !begun.is_empty() {
            self.survey(begun, Reason::Taken);
        }
    }

    pub(super) fn forget_recorded(&mut self, number: ReadNumber) {
        while let Some((endpoint, event, attempt)) = pop_up_to(&mut self.state.recorded, number) {
            if let Some(lane) = self.state.lanes.get_mut(&endpoint) {
                lane.forget(event, attempt);
            }
        }
    }

    pub(super) fn resume_after_withdrawals(&mut self, number: ReadNumber) {
        while let Some((endpoint, epoch)) = pop_up_to(&mut self.state.withdrawn, number) {
            let now = self.clock.now();
            let lane = self.state.lanes.get_mut(&endpoint);
            if let Some(lane) = lane.filter(|lane| lane.epoch() == epoch) {
                if let Some(again) = lane.withdrawn(now) {
                    let _ = self.withdrawals.send(again);
                }
                self.settle(endpoint);
            }
        }
    }

    /// The connection is gone and with it the reader's state: every lane reads its rows again. Attempts in flight
    /// continue.
    pub(super) fn reload(&mut self) {
        let now = self.clock.now();
        self.state.taken = self.state.owned.keys().copied().collect();
        self.state.reload = true;
        self.state.begun.clear();
        self.state.loading.clear();
        // The new connection knows no endpoint; these are searched for with all others.
        self.state.found.clear();
        self.state.unusable.clear();
        self.state.sweep_hits.clear();
        self.state.missed.clear();
        self.state.sweep_outdated.extend(self.state.owned.keys());
        let ids: Vec<EndpointId> = self.state.lanes.keys().copied().collect();
        for id in ids {
            self.change_lane(id, |lane| lane.reload(now));
        }
    }
}
