//! Work found outside the tail: rows of shards just taken over, and rows a sweep saw that the tail should have shown.

use super::*;

impl Engine {
    /// Searches for rows that the tail did not show. There should be none.
    pub(crate) fn sweep(&mut self) {
        if self.state.owned.is_empty() {
            self.state.sweep_at = Some(Instant::now() + SWEEP_EVERY);
            return;
        }
        self.state.sweeping = true;
        self.state.sweep_outdated.clear();
        // Shards that are not tailed yet have rows that no tail has shown.
        let state = &self.state;
        let is_tailed = |shard: &Shard| !state.taken.contains(shard) && !state.begun.contains(shard);
        let tailed = state.owned.keys().copied().filter(is_tailed).collect();
        self.survey(tailed, Reason::Sweep);
    }

    pub(super) fn survey(&mut self, shards: Vec<Shard>, reason: Reason) {
        if reason == Reason::Taken {
            self.state.sweep_outdated.extend(&shards);
            self.state
                .sweep_hits
                .retain(|(_, found)| !shards.contains(&found.shard));
        }
        let owned = |shard: Shard| self.state.owned.get(&shard).map(|epoch| (shard, *epoch));
        let shards = shards.into_iter().filter_map(owned).collect();
        let _ = self.surveys.send(survey::Request { shards, reason });
    }

    pub(super) fn surveyed(&mut self, report: Report) {
        match report {
            Report::Found {
                reason,
                epochs,
                endpoints,
            } => {
                let epochs: HashMap<Shard, Epoch> = epochs.into_iter().collect();
                for found in endpoints {
                    // The shard may have been lost, or lost and regained, since the request.
                    if self.state.owned.get(&found.shard) != epochs.get(&found.shard) {
                        continue;
                    }
                    match reason {
                        Reason::Taken => self.found(found),
                        Reason::Sweep if self.state.sweep_outdated.contains(&found.shard) => {}
                        Reason::Sweep => self.state.sweep_hits.push_back((self.state.reads + 1, found)),
                    }
                }
            }
            Report::Swept(took) => {
                self.state.sweeping = false;
                self.state.sweep_at = Some(Instant::now() + SWEEP_EVERY.max(took * SWEEP_PART));
            }
        }
    }

    /// Registers rows that no tail will show.
    pub(super) fn found(&mut self, found: Found) {
        match self.state.lanes.get_mut(&found.endpoint) {
            Some(lane) => {
                lane.found(found.first, found.next_due);
                self.settle(found.endpoint);
            }
            None if self.state.unusable.contains_key(&found.endpoint) => {}
            None => {
                let known = self.state.found.entry(found.endpoint).or_insert(found);
                known.first = known.first.into_iter().chain(found.first).min();
                known.next_due = known.next_due.into_iter().chain(found.next_due).min();
            }
        }
    }

    /// Checks rows that a sweep saw before a read whose tail should have shown them. If the lane is idle, they were
    /// either sent meanwhile or missed; reading them tells which.
    pub(super) fn check_sweep_hits(&mut self, number: ReadNumber) {
        while let Some(found) = pop_up_to(&mut self.state.sweep_hits, number) {
            let lane = self.state.lanes.get(&found.endpoint);
            let is_owned = self.state.owned.contains_key(&found.shard);
            // Its rows were found by a survey and are about to be read.
            let is_expected = self.state.found.contains_key(&found.endpoint);
            // Its rows wait for settings that can be used.
            let is_unusable = self.state.unusable.contains_key(&found.endpoint);
            if !is_owned || is_expected || is_unusable || lane.is_some_and(|lane| !lane.is_idle()) {
                continue;
            }
            if let Some(first) = found.first {
                self.state.missed.insert(found.endpoint, (found.shard, first));
            }
            self.found(found);
        }
    }

    /// Reports missed rows when an idle lane was given them to read again.
    pub(super) fn note_missed(&mut self, endpoint: EndpointId, rows: &[QueuedDelivery]) {
        if let Some((_, missed)) = self.state.missed.remove(&endpoint)
            && rows.iter().any(|row| row.event == missed)
        {
            tracing::error!(%endpoint, "the sweep found rows that the tail had missed");
            METRICS.tail_missed.increment(1);
            self.state.missed_count += 1;
        }
    }
}
