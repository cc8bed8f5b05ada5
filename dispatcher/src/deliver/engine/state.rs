//! The engine's state. Only the engine changes it.

use super::*;

#[derive(Default)]
pub(crate) struct State {
    pub(super) owned: HashMap<Shard, Epoch>,
    /// Owned, but not yet tailed.
    pub(super) taken: Vec<Shard>,
    /// Tailed from the end of the current cycle on: older rows are searched for then.
    pub(super) begun: Vec<Shard>,
    /// Endpoints with work and no lane, to be loaded, with what was found.
    pub(super) found: HashMap<EndpointId, Found>,
    /// The ones that the current cycle loads.
    pub(super) loading: Vec<EndpointId>,
    /// The reader has a new connection: the settings of all lanes are read again.
    pub(super) reload: bool,
    /// Rows that a sweep has seen. The tail must have shown them by the read with this number.
    pub(super) sweep_hits: VecDeque<(ReadNumber, Found)>,
    /// Rows that the tail did not show, if they still exist when they are read.
    pub(super) missed: HashMap<EndpointId, (Shard, EventId)>,
    pub(super) missed_count: u64,
    /// Endpoints whose settings can't be used. They have no lane until those change.
    pub(super) unusable: HashMap<EndpointId, Shard>,
    pub(super) sweeping: bool,
    /// Shards that were searched as if just taken since the current sweep began: its rows of them say nothing about the tail.
    pub(super) sweep_outdated: HashSet<Shard>,
    pub(super) sweep_at: Option<Instant>,
    /// Shards to be released.
    pub(super) draining: Draining,
    /// The term of the lease that deliveries are picked under.
    pub(super) term: Option<CancellationToken>,
    pub(super) stopping: bool,
    pub(super) lanes: HashMap<EndpointId, Lane>,
    /// Lanes that can send, each once, served in turn.
    pub(super) ready: VecDeque<EndpointId>,
    pub(super) is_ready: HashSet<EndpointId>,
    /// Lanes that want rows from disk or keys looked up, each once, served in turn.
    pub(super) refill_queue: VecDeque<EndpointId>,
    pub(super) in_refill_queue: HashSet<EndpointId>,
    /// When lanes have retries due.
    pub(super) due: BTreeSet<(DateTime<Utc>, EndpointId)>,
    pub(super) due_of: HashMap<EndpointId, DateTime<Utc>>,
    /// When lanes that wait for their rate limit or for a probe may continue.
    pub(super) timers: BTreeSet<(Monotonic, EndpointId)>,
    pub(super) timer_of: HashMap<EndpointId, Monotonic>,
    /// Recorded deliveries, to be forgotten after the read with this number.
    pub(super) recorded: VecDeque<(ReadNumber, (EndpointId, EventId, u16))>,
    /// Completed withdrawals; reads before this number may still show their rows.
    pub(super) withdrawn: VecDeque<(ReadNumber, (EndpointId, Epoch))>,
    pub(super) forget: Vec<EndpointId>,
    /// Endpoints that were paused or deleted while attempts of theirs were in flight or unrecorded.
    pub(super) ending: HashSet<EndpointId>,
    /// Settings that are applied, but not yet quiet.
    pub(super) unquiet: Option<String>,
    pub(super) reads: ReadNumber,
    pub(super) reading: bool,
    /// Nothing is in flight and nothing new came: the next read may wait for a change.
    pub(super) may_wait: bool,
}

/// Takes the first entry, if it waited for this read or an earlier one.
pub(super) fn pop_up_to<T>(queue: &mut VecDeque<(ReadNumber, T)>, number: ReadNumber) -> Option<T> {
    let is_due = queue.front()?.0 <= number;
    is_due
        .then(|| queue.pop_front())
        .flatten()
        .map(|(_, entry)| entry)
}

/// Updates a set ordered by time that contains each endpoint at most once.
pub(super) fn keep_in_order<T: Ord + Copy>(
    order: &mut BTreeSet<(T, EndpointId)>,
    times: &mut HashMap<EndpointId, T>,
    id: EndpointId,
    time: Option<T>,
) {
    if times.get(&id) == time.as_ref() {
        return;
    }
    if let Some(old) = times.remove(&id) {
        order.remove(&(old, id));
    }
    if let Some(time) = time {
        times.insert(id, time);
        order.insert((time, id));
    }
}
