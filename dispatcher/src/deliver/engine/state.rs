//! Everything the engine knows. Only the engine changes it.

use super::*;

#[derive(Default)]
pub(crate) struct State {
    pub(super) owned: HashMap<Shard, Epoch>,
    /// Owned, but not yet tailed.
    pub(super) taken: Vec<Shard>,
    /// Tailed from the end of the cycle under way: what they hold then is looked for.
    pub(super) begun: Vec<Shard>,
    /// Endpoints with work and no lane, to be loaded, with what was found of them.
    pub(super) found: HashMap<EndpointId, Found>,
    /// Of those, the ones that the cycle under way loads.
    pub(super) loading: Vec<EndpointId>,
    /// The reader has a new connection: the settings of all lanes are read again.
    pub(super) reload: bool,
    /// Rows that a sweep has seen. By a read of this number the tail must have shown them.
    pub(super) suspects: VecDeque<(ReadNumber, Found)>,
    /// Rows that the tail did not show, if they are still there when they are read.
    pub(super) missed: HashMap<EndpointId, EventId>,
    /// Endpoints whose settings can't be used. They have no lane until those change.
    pub(super) unusable: HashMap<EndpointId, Shard>,
    pub(super) sweeping: bool,
    pub(super) sweep_at: Option<Instant>,
    /// To be given back.
    pub(super) draining: Draining,
    /// The term of the lease that deliveries are picked under, once there is one.
    pub(super) term: Option<CancellationToken>,
    pub(super) stopping: bool,
    pub(super) lanes: HashMap<EndpointId, Lane>,
    /// Lanes that can send, each once, served in turn.
    pub(super) ready: VecDeque<EndpointId>,
    pub(super) is_ready: HashSet<EndpointId>,
    /// Spilled lanes with room, each once, refilled in turn.
    pub(super) hungry: VecDeque<EndpointId>,
    pub(super) is_hungry: HashSet<EndpointId>,
    /// When lanes have retries due.
    pub(super) due: BTreeSet<(DateTime<Utc>, EndpointId)>,
    pub(super) due_of: HashMap<EndpointId, DateTime<Utc>>,
    /// When lanes that wait for their rate or for a probe may go on.
    pub(super) timers: BTreeSet<(Monotonic, EndpointId)>,
    pub(super) timer_of: HashMap<EndpointId, Monotonic>,
    /// Recorded deliveries, to be forgotten after a read of this number.
    pub(super) recorded: VecDeque<(ReadNumber, EndpointId, EventId, u16)>,
    /// Taken back of cancelled replays; until a read of this number older ones may still show it.
    pub(super) withdrawn: VecDeque<(ReadNumber, EndpointId, Epoch)>,
    pub(super) forget: Vec<EndpointId>,
    pub(super) reads: ReadNumber,
    pub(super) reading: bool,
    /// Nothing was on the wire and nothing new came: the next read may wait for something.
    pub(super) patient: bool,
}

/// A set in order of time that holds each endpoint at most once.
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
