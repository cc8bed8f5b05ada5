//! Drops the lanes of lost shards and reports drained ones.

use super::*;

impl Engine {
    pub(super) fn drop_lanes(&mut self, shard: Shard) {
        let gone: Vec<EndpointId> = self
            .state
            .lanes
            .iter()
            .filter(|(_, lane)| lane.endpoint().shard == shard)
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            if let Some(lane) = self.state.lanes.remove(&id) {
                lane.endpoint().stop();
            }
            self.state.forget.push(id);
            self.settle(id);
        }
        self.state.found.retain(|_, found| found.shard != shard);
        self.state.sweep_hits.retain(|(_, found)| found.shard != shard);
        self.state.missed.retain(|_, (of, _)| *of != shard);
        let forget = &mut self.state.forget;
        self.state.unusable.retain(|id, of| {
            if *of == shard {
                forget.push(*id);
            }
            *of != shard
        });
    }

    pub(crate) fn report_drained(&mut self) {
        let now = self.started.elapsed();
        if !self.state.draining.needs_check(now) {
            return;
        }
        let lanes = self.state.lanes.values();
        let progress = self.state.draining.check(lanes, now, self.state.stopping);
        for shard in progress.drained {
            let _ = self.drained.send(shard);
        }
        if progress.resumed.is_empty() {
            return;
        }
        let lanes = self.state.lanes.iter();
        let resumed = lanes.filter(|(_, lane)| progress.resumed.contains(&lane.endpoint().shard));
        for id in resumed.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.settle(id);
        }
    }
}
