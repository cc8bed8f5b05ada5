//! The judge: proves each invariant from a history, or says what broke it. Pure, so that it can be shown broken ones.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt,
    time::Duration,
};

use postrider_proto::signature::{Secret, verify, verify_standard};

use crate::history::{
    EndpointLife, Harm, History, Mark, Moment, Outcome, Probe, Request, Spell, StoredDelivery, Transaction,
};

/// What a busy machine may put between a request's start and its being seen, or its end and that being seen.
const GRACE: Duration = Duration::from_millis(500);
/// An owner that can't renew for this long may lose its shards: a lease is five seconds, renewed every second.
const LEASE_AT_RISK: Duration = Duration::from_millis(2_500);
/// Two outages this close together may look like one to a lease.
const OUTAGES_APART: Duration = Duration::from_secs(3);
/// Before a fault: answered, and not yet recorded. After it: until everybody knows whose the shards are.
const BEFORE: Duration = Duration::from_secs(2);
const AFTER: Duration = Duration::from_secs(8);
/// A shard's old and new owner both act until the old one looks at the table, and one attempt longer.
const ROBBERY_LASTS: Duration = Duration::from_secs(5);
/// Between the `t` of a signature and the request's arrival.
const SIGNED_BEFORE_MAX_S: i64 = 7;
const SIGNED_AFTER_MAX_S: i64 = 2;
/// A tenant that does no harm, on an installation that is left alone: whatever other tenants do, each of its requests is
/// done by then. A busy machine with two processors and programs that are not optimised needs some of it.
const SERVED_BY: Duration = Duration::from_secs(4);
/// And of a hundred only one takes longer than this.
const SERVED_BY_MOSTLY: Duration = Duration::from_millis(1_500);
/// Fewer than this have no hundredth.
const PROBES_LEAST: usize = 100;
/// After the last thing that was done to the installation: leases run out, connections that fell silent are given up, what
/// waited is sent.
const SETTLES: Duration = Duration::from_secs(10);
/// After the start.
const STARTS: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rule {
    /// Every committed event reached every endpoint that was subscribed, or is a visible dead letter.
    Lost,
    /// Nothing that was rolled back, or that nobody asked for, was sent.
    Phantom,
    /// A transaction is there as a whole or not at all.
    Torn,
    /// The bytes sent are the bytes stored.
    Body,
    /// Signed with secrets that were in force, at the time it was sent.
    Signature,
    /// A request came again without a fault that explains it.
    Repeated,
    /// More in flight at an endpoint than its bulkhead.
    Bulkhead,
    /// A key's events came out of their sequence.
    Order,
    /// Something waits although nothing holds it up, or is in two places.
    Stuck,
    /// What is recorded is not what the receivers saw.
    Record,
    /// A request started after a confirmed pause or deletion.
    Late,
    /// A process wrote of something that must not happen.
    Alarm,
    /// One emit became more than one event.
    Doubled,
    /// A tenant that does no harm was served late, though nothing was done to the installation.
    Delayed,
}

#[derive(Debug)]
pub(crate) struct Violation {
    pub(crate) rule: Rule,
    pub(crate) words: String,
}

#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) committed: usize,
    pub(crate) rolled_back: usize,
    pub(crate) unknown: usize,
    pub(crate) unknown_committed: usize,
    /// Sent from a primary that was replaced, and never acknowledged.
    pub(crate) unknown_sent: usize,
    pub(crate) deliveries: usize,
    pub(crate) delivered: usize,
    pub(crate) dead: usize,
    pub(crate) lost: usize,
    pub(crate) requests: usize,
    pub(crate) attempts_recorded: usize,
    pub(crate) repeats_explained: usize,
    pub(crate) faults: BTreeMap<&'static str, usize>,
    /// The most in flight at an endpoint as a share of its bulkhead.
    pub(crate) fullest: f64,
    /// With the sockets of sleeping processes, which nobody can take from them.
    pub(crate) fullest_with_sleepers: f64,
    /// How soon the steady tenant was served while the installation was left alone, by kind of request, ascending.
    pub(crate) served: BTreeMap<&'static str, Vec<Duration>>,
    /// Probes that were made at other times, and are not judged.
    pub(crate) probes_disturbed: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Judgement {
    pub(crate) figures: Figures,
    pub(crate) violations: Vec<Violation>,
}

impl Judgement {
    fn accuse(&mut self, rule: Rule, words: impl fmt::Display) {
        let words = words.to_string();
        self.violations.push(Violation { rule, words });
    }

    pub(crate) fn broken(&self) -> BTreeSet<Rule> {
        self.violations.iter().map(|violation| violation.rule).collect()
    }
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Of each rule.
        const SHOWN: usize = 4;
        let n = &self.figures;
        let faults: usize = n.faults.values().sum();
        writeln!(
            f,
            "events      {} committed, {} rolled back, {} unknown of which {} committed",
            n.committed, n.rolled_back, n.unknown, n.unknown_committed
        )?;
        if n.unknown_sent > 0 {
            writeln!(
                f,
                "            {} deliveries of unknown ones that went with the server they were committed on",
                n.unknown_sent
            )?;
        }
        writeln!(f, "faults      {faults}: {:?}", n.faults)?;
        writeln!(
            f,
            "deliveries  {} due: {} delivered, {} dead letters, {} lost",
            n.deliveries, n.delivered, n.dead, n.lost
        )?;
        writeln!(
            f,
            "attempts    {} seen by receivers, {} recorded, {} repeats explained by a fault",
            n.requests, n.attempts_recorded, n.repeats_explained
        )?;
        writeln!(
            f,
            "bulkheads   {:.0} % full at most; {:.0} % with the sockets of sleeping processes",
            100.0 * n.fullest,
            100.0 * n.fullest_with_sleepers
        )?;
        for (kind, times) in &n.served {
            let of = |share: f64| match times[((times.len() - 1) as f64 * share) as usize] {
                Duration::MAX => "never".to_owned(),
                time => format!("{} ms", time.as_millis()),
            };
            writeln!(
                f,
                "steady      {kind}: {} while the installation was left alone, p50 {}, p99 {}, the slowest {}",
                times.len(),
                of(0.5),
                of(0.99),
                of(1.0)
            )?;
        }
        if n.probes_disturbed > 0 {
            writeln!(
                f,
                "            {} more beside faults are not judged",
                n.probes_disturbed
            )?;
        }
        for rule in self.broken() {
            let of_rule: Vec<&Violation> = self.violations.iter().filter(|v| v.rule == rule).collect();
            writeln!(f, "BROKEN      {rule:?}: {} times", of_rule.len())?;
            for violation in of_rule.iter().take(SHOWN) {
                writeln!(f, "              {}", violation.words)?;
            }
        }
        Ok(())
    }
}

/// A delivery as all sides tell of it.
struct Case<'a> {
    requests: Vec<&'a Request>,
    stored: Option<&'a StoredDelivery>,
}

pub(crate) fn judge(history: &History) -> Judgement {
    let mut judgement = Judgement::default();
    let j = &mut judgement;
    let emitted = transactions(history, j);
    let cases = cases(history);
    deliveries(history, &emitted, &cases, j);
    contents(history, j);
    records(history, &cases, j);
    for (number, endpoint) in history.endpoints.iter().enumerate() {
        let requests: Vec<&Request> = history.requests.iter().filter(|r| r.endpoint == number).collect();
        signatures(endpoint, &requests, j);
        bulkhead(endpoint, &requests, &history.spells, j);
        late(endpoint, &requests, j);
        if endpoint.ordered {
            order(endpoint, &requests, &history.spells, j);
        }
    }
    latency(history, j);
    for (mark, count) in &history.stored.copies {
        j.accuse(Rule::Doubled, format!("{mark}: {count} events of one emit"));
    }
    if let Some(line) = &history.undrained {
        j.accuse(Rule::Stuck, line);
    }
    for line in &history.stored.unfinished_replays {
        j.accuse(Rule::Stuck, line);
    }
    for line in &history.alarms {
        j.accuse(Rule::Alarm, line);
    }
    for spell in &history.spells {
        *j.figures.faults.entry(spell.kind).or_default() += 1;
    }
    judgement
}

/// The marks of events that are there, with the transaction they came in.
fn transactions<'a>(history: &'a History, j: &mut Judgement) -> HashMap<&'a Mark, usize> {
    let mut there = HashMap::new();
    for (number, transaction) in history.transactions.iter().enumerate() {
        let stored = |event: &&crate::history::Emitted| history.stored.bodies.contains_key(&event.mark);
        let found = transaction.events.iter().filter(stored).count();
        let all = transaction.events.len();
        match transaction.outcome {
            Outcome::Committed => {
                j.figures.committed += all;
                for lost in transaction.events.iter().filter(|event| !stored(event)) {
                    j.figures.lost += 1;
                    let words = format!(
                        "{} was committed from {:.3} to {:.3} s and is not stored",
                        lost.mark,
                        transaction.began.as_secs_f64(),
                        transaction.ended.as_secs_f64()
                    );
                    j.accuse(Rule::Lost, words);
                }
            }
            Outcome::RolledBack => {
                j.figures.rolled_back += all;
                for event in transaction.events.iter().filter(stored) {
                    j.accuse(
                        Rule::Phantom,
                        format!("{} was rolled back and is stored", event.mark),
                    );
                }
            }
            Outcome::Unknown => {
                j.figures.unknown += all;
                j.figures.unknown_committed += found;
                if found != 0 && found != all {
                    let first = &transaction.events[0].mark;
                    j.accuse(
                        Rule::Torn,
                        format!("{found} of {all} of the transaction of {first} are there"),
                    );
                }
            }
        }
        there.extend(
            transaction
                .events
                .iter()
                .filter(stored)
                .map(|event| (&event.mark, number)),
        );
    }
    there
}

fn cases(history: &History) -> HashMap<(&Mark, usize), Case<'_>> {
    let mut cases: HashMap<(&Mark, usize), Case<'_>> = HashMap::new();
    let empty = || Case {
        requests: Vec::new(),
        stored: None,
    };
    for ((mark, endpoint), delivery) in &history.stored.deliveries {
        cases.entry((mark, *endpoint)).or_insert_with(empty).stored = Some(delivery);
    }
    for request in &history.requests {
        let case = cases
            .entry((&request.mark, request.endpoint))
            .or_insert_with(empty);
        case.requests.push(request);
    }
    cases
}

fn deliveries(
    history: &History,
    emitted: &HashMap<&Mark, usize>,
    cases: &HashMap<(&Mark, usize), Case<'_>>,
    j: &mut Judgement,
) {
    for (mark, transaction) in emitted {
        let transaction = &history.transactions[*transaction];
        let Some(event) = transaction.events.iter().find(|event| event.mark == **mark) else {
            continue;
        };
        for (number, endpoint) in history.endpoints.iter().enumerate() {
            let case = cases.get(&(*mark, number));
            // One whose answer was lost may have been committed later still.
            let open_end = transaction.outcome == Outcome::Unknown;
            let in_time = open_end || transaction.ended >= endpoint.made.0;
            let asked = endpoint.wants(event) && in_time;
            if !asked {
                if case.is_some() {
                    let words = format!("{mark} went to {}, which did not ask for it", endpoint.id);
                    j.accuse(Rule::Phantom, words);
                }
                continue;
            }
            // Made while the transaction ran, or deleted since: either is right.
            let certain = transaction.began >= endpoint.made.1 && endpoint.deleted.is_none();
            if certain || case.is_some() {
                j.figures.deliveries += 1;
                one_delivery(mark, endpoint, case, certain, j);
            }
        }
    }
    let is_unknown = |transaction: &&Transaction| transaction.outcome == Outcome::Unknown;
    let unknown = history.transactions.iter().filter(is_unknown);
    let unknown: HashSet<&Mark> = unknown
        .flat_map(|transaction| &transaction.events)
        .map(|event| &event.mark)
        .collect();
    for (mark, endpoint) in cases.keys() {
        if history.loses_unacknowledged && unknown.contains(mark) && !emitted.contains_key(mark) {
            j.figures.unknown_sent += 1;
        } else if !emitted.contains_key(mark) {
            let id = &history.endpoints[*endpoint].id;
            j.accuse(
                Rule::Phantom,
                format!("{mark} came to {id}, and nobody committed it"),
            );
        }
    }
}

fn one_delivery(
    mark: &Mark,
    endpoint: &EndpointLife,
    case: Option<&Case<'_>>,
    certain: bool,
    j: &mut Judgement,
) {
    let who = format!("{mark} to {}", endpoint.id);
    let Some(stored) = case.and_then(|case| case.stored) else {
        if certain {
            j.figures.lost += 1;
            j.accuse(Rule::Lost, format!("{who}: no trace of the delivery"));
        }
        return;
    };
    let ends: Vec<&str> = stored
        .attempts
        .iter()
        .filter_map(|attempt| attempt.ended.as_deref())
        .collect();
    let places = ends.len() + usize::from(stored.queued) + usize::from(stored.waiting);
    if places > 1 {
        j.accuse(Rule::Stuck, format!("{who}: in {places} places at once"));
    }
    if (stored.queued || stored.waiting) && endpoint.deleted.is_none() {
        j.accuse(Rule::Stuck, format!("{who}: still waits after the end"));
    }
    match ends.first() {
        Some(&"delivered") => {
            j.figures.delivered += 1;
            let accepted = |r: &&Request| r.status.is_some_and(|status| status / 100 == 2);
            if !case.is_some_and(|case| case.requests.iter().any(accepted)) {
                j.figures.lost += 1;
                j.accuse(
                    Rule::Lost,
                    format!("{who}: recorded as delivered, never accepted there"),
                );
            }
        }
        Some(_) => {
            j.figures.dead += 1;
            if !stored.dead_letter {
                j.accuse(Rule::Lost, format!("{who}: dead, and not among the dead letters"));
            }
        }
        None if certain && places == 0 => {
            j.figures.lost += 1;
            j.accuse(Rule::Lost, format!("{who}: tried, and in no place now"));
        }
        None => {}
    }
}

fn contents(history: &History, j: &mut Judgement) {
    for request in &history.requests {
        if let Some(stored) = history.stored.bodies.get(&request.mark)
            && stored[..] != request.body[..]
        {
            j.accuse(
                Rule::Body,
                format!("{}: other bytes than those stored", request.mark),
            );
        }
    }
}

/// When a request may have been made and not recorded, so that it comes again.
fn excuses(spells: &[Spell]) -> Vec<(Moment, Moment)> {
    let mut outages: Vec<(Moment, Moment)> = spells
        .iter()
        .filter(|spell| matches!(spell.harm, Harm::Outage | Harm::Sleep))
        .map(|spell| (spell.from, spell.to))
        .collect();
    outages.sort_unstable();
    let mut merged: Vec<(Moment, Moment)> = Vec::new();
    for (from, to) in outages {
        match merged.last_mut() {
            Some(last) if from <= last.1 + OUTAGES_APART => last.1 = last.1.max(to),
            _ => merged.push((from, to)),
        }
    }
    merged.retain(|(from, to)| *to - *from >= LEASE_AT_RISK);
    let at_once = spells
        .iter()
        .filter(|spell| matches!(spell.harm, Harm::Death | Harm::Robbery));
    merged.extend(at_once.map(|spell| (spell.from, spell.from)));
    merged
        .into_iter()
        .map(|(from, to)| (from.saturating_sub(BEFORE), to + AFTER))
        .collect()
}

/// Each recorded answer is one that a receiver gave; each request that is not recorded is explained by a fault.
fn records(history: &History, cases: &HashMap<(&Mark, usize), Case<'_>>, j: &mut Judgement) {
    let excuses = excuses(&history.spells);
    j.figures.requests = history.requests.len();
    for ((mark, endpoint), case) in cases {
        let id = &history.endpoints[*endpoint].id;
        // What is on the wire as its endpoint is deleted has no row to be recorded in.
        let deleted = history.endpoints[*endpoint].deleted.map(|(asked, _)| asked);
        let attempts = case.stored.map_or(&[][..], |stored| stored.attempts.as_slice());
        j.figures.attempts_recorded += attempts.len();
        let mut unmatched: Vec<&Request> = case.requests.clone();
        let numbers: HashSet<i16> = attempts.iter().map(|attempt| attempt.number).collect();
        if numbers.len() != attempts.len() {
            j.accuse(
                Rule::Record,
                format!("{mark} to {id}: an attempt's number was used twice"),
            );
        }
        let (answered, cut): (Vec<_>, Vec<_>) = attempts.iter().partition(|attempt| attempt.status.is_some());
        for attempt in answered {
            let seen = unmatched.iter().position(|request| {
                attempt.status == request.status && attempt.signature.as_ref() == Some(&request.signature)
            });
            match seen {
                Some(place) => drop(unmatched.swap_remove(place)),
                None => {
                    let words = format!(
                        "{mark} to {id}: attempt {} is recorded and no receiver saw it",
                        attempt.number
                    );
                    j.accuse(Rule::Record, words);
                }
            }
        }
        // Without an answer: the receiver may have seen the request or not.
        for attempt in cut {
            let seen = unmatched
                .iter()
                .position(|request| attempt.signature.as_ref() == Some(&request.signature));
            if let Some(place) = seen {
                unmatched.swap_remove(place);
            }
        }
        for request in unmatched {
            let excused = excuses
                .iter()
                .any(|(from, to)| request.at <= *to && request.ended >= *from);
            if excused || deleted.is_some_and(|asked| request.ended >= asked) {
                j.figures.repeats_explained += 1;
            } else {
                let words = format!(
                    "{mark} to {id}: the request at {:.3} s ({:?}) is not recorded, and nothing happened then",
                    request.at.as_secs_f64(),
                    request.status
                );
                j.accuse(Rule::Repeated, words);
            }
        }
        let accepted = attempts
            .iter()
            .filter(|attempt| attempt.status.is_some_and(|status| status / 100 == 2));
        let replays = case.stored.map_or(0, |stored| stored.replays);
        if accepted.count() > 1 + replays {
            j.accuse(
                Rule::Repeated,
                format!("{mark} to {id}: recorded as accepted twice"),
            );
        }
    }
}

fn verifies(endpoint: &EndpointLife, request: &Request, secret: &str) -> bool {
    let secrets = [Secret::new(secret)];
    if endpoint.standard {
        verify_standard(
            &request.event_id,
            &request.timestamp,
            &request.signature,
            &request.body,
            &secrets,
            request.unix,
        )
        .is_ok()
    } else {
        verify(&request.signature, &request.body, &secrets, request.unix).is_ok()
    }
}

fn signatures(endpoint: &EndpointLife, requests: &[&Request], j: &mut Judgement) {
    for request in requests {
        let who = format!(
            "{} to {} at {:.3} s",
            request.mark,
            endpoint.id,
            request.at.as_secs_f64()
        );
        let t: i64 = request.timestamp.parse().unwrap_or(0);
        if t < request.unix - SIGNED_BEFORE_MAX_S || t > request.unix + SIGNED_AFTER_MAX_S {
            let words = format!("{who}: signed for {t}, which is {} s off", t - request.unix);
            j.accuse(Rule::Signature, words);
        }
        let in_effect = |life: &crate::history::SecretLife| {
            life.in_effect
                .is_some_and(|at| at <= request.at.saturating_sub(GRACE))
        };
        let newest = endpoint.secrets.iter().rposition(in_effect).unwrap_or(0);
        let mut signed = false;
        for (place, life) in endpoint.secrets.iter().enumerate() {
            let asked = life.asked <= request.at;
            let retired = life.retires_unix.is_some_and(|at| t > at + 1);
            let by_this = verifies(endpoint, request, &life.secret);
            if by_this && (!asked || retired) {
                j.accuse(
                    Rule::Signature,
                    format!("{who}: signed with a secret that is not in force"),
                );
            }
            signed |= by_this && place >= newest;
        }
        if !signed {
            j.accuse(
                Rule::Signature,
                format!("{who}: not signed with the current secret"),
            );
        }
    }
}

fn bulkhead(endpoint: &EndpointLife, requests: &[&Request], spells: &[Spell], j: &mut Judgement) {
    let slept_through = |request: &Request| {
        let given_up = request.status.is_none();
        given_up
            && spells
                .iter()
                .any(|s| s.harm == Harm::Sleep && request.at <= s.to && request.ended >= s.from)
    };
    // That a sender went away is seen a little later than it happened.
    let ended = |request: &Request| match request.status {
        Some(_) => request.ended,
        None => request.ended.saturating_sub(GRACE).max(request.at),
    };
    let with_sleepers = most_at_once(requests.iter().map(|r| (r.at, ended(r)))).0;
    let awake = requests.iter().filter(|request| !slept_through(request));
    let robbed = |at: Moment| {
        spells
            .iter()
            .any(|s| s.harm == Harm::Robbery && s.from <= at && at <= s.from + ROBBERY_LASTS)
    };
    let (most, when) = most_at_once(
        awake
            .filter(|r| !robbed(r.at) && !robbed(r.ended))
            .map(|r| (r.at, ended(r))),
    );
    let share = |most: usize| most as f64 / endpoint.bulkhead as f64;
    j.figures.fullest = j.figures.fullest.max(share(most));
    j.figures.fullest_with_sleepers = j.figures.fullest_with_sleepers.max(share(with_sleepers));
    if most > endpoint.bulkhead {
        let words = format!(
            "{}: {most} in flight at {:.3} s, allowed are {}",
            endpoint.id,
            when.as_secs_f64(),
            endpoint.bulkhead
        );
        j.accuse(Rule::Bulkhead, words);
    }
}

fn most_at_once(intervals: impl Iterator<Item = (Moment, Moment)>) -> (usize, Moment) {
    let mut changes: Vec<(Moment, isize)> = intervals.flat_map(|(from, to)| [(from, 1), (to, -1)]).collect();
    // At one instant what ends comes first.
    changes.sort_unstable();
    let (mut now, mut most, mut when) = (0_isize, 0, Moment::ZERO);
    for (at, change) in changes {
        now += change;
        if now > most {
            (most, when) = (now, at);
        }
    }
    (most as usize, when)
}

fn late(endpoint: &EndpointLife, requests: &[&Request], j: &mut Judgement) {
    let deleted = endpoint.deleted.and_then(|(_, confirmed)| confirmed);
    let closed = endpoint.pauses.iter().copied();
    let closed = closed.chain(deleted.map(|at| (at, Moment::MAX)));
    for (from, to) in closed {
        for request in requests.iter().filter(|r| r.at > from + GRACE && r.at < to) {
            let words = format!(
                "{} to {} at {:.3} s, {:.3} s after it was confirmed closed",
                request.mark,
                endpoint.id,
                request.at.as_secs_f64(),
                (request.at - from).as_secs_f64()
            );
            j.accuse(Rule::Late, words);
        }
    }
}

/// The requests of one key start in the order of its sequence, and one starts only after the one before was answered.
fn order(endpoint: &EndpointLife, requests: &[&Request], spells: &[Spell], j: &mut Judgement) {
    let robbed = |at: Moment| {
        spells
            .iter()
            .any(|s| s.harm == Harm::Robbery && s.from <= at && at <= s.from + ROBBERY_LASTS)
    };
    let mut keys: BTreeMap<&str, Vec<(&Request, i64)>> = BTreeMap::new();
    for request in requests {
        if let Some((key, sequence)) = &request.sequence {
            keys.entry(key).or_default().push((request, *sequence));
        }
    }
    for (key, mut line) in keys {
        line.sort_by_key(|(request, _)| request.at);
        // What waited for its next attempt and was replayed is accepted as a replay, and the next may go.
        let mut accepted: BTreeMap<i64, Moment> = BTreeMap::new();
        for (request, sequence) in &line {
            if request.status.is_some_and(|status| status / 100 == 2) {
                let first = accepted.entry(*sequence).or_insert(request.ended);
                *first = (*first).min(request.ended);
            }
        }
        let mut highest = i64::MIN;
        for (request, sequence) in line.iter().filter(|(request, _)| !request.replay) {
            let who = format!(
                "key {key} at {}: {sequence} at {:.3} s",
                endpoint.id,
                request.at.as_secs_f64()
            );
            if *sequence < highest && !robbed(request.at) {
                j.accuse(Rule::Order, format!("{who} came after {highest}"));
            }
            if *sequence > highest && highest != i64::MIN && !robbed(request.at) {
                let before = accepted.get(&highest);
                if before.is_none_or(|at| *at > request.at) {
                    j.accuse(Rule::Order, format!("{who} came before {highest} was accepted"));
                }
            }
            highest = highest.max(*sequence);
        }
    }
}

/// Whether nothing was done to the installation from then on until a request of then must be done, nor just before.
fn is_calm(spells: &[Spell], asked: Moment) -> bool {
    let disturbed =
        |spell: &Spell| spell.disturbs && spell.from <= asked + SERVED_BY && asked <= spell.to + SETTLES;
    asked >= STARTS && !spells.iter().any(disturbed)
}

/// While the installation is left alone, the steady tenant is served in time, whatever other tenants do.
fn latency(history: &History, j: &mut Judgement) {
    let mut arrivals: HashMap<(&Mark, usize, bool), Vec<Moment>> = HashMap::new();
    for request in &history.requests {
        let key = (&request.mark, request.endpoint, request.replay);
        arrivals.entry(key).or_default().push(request.at);
    }
    let arrived = |probe: &Probe| {
        let all = arrivals.get(&(&probe.mark, probe.endpoint, probe.replay));
        let since = all.into_iter().flatten().filter(|at| **at >= probe.asked);
        since.min().map(|at| *at - probe.asked)
    };
    for probe in &history.probes {
        if !is_calm(&history.spells, probe.asked) {
            j.figures.probes_disturbed += 1;
            continue;
        }
        let took = arrived(probe);
        if took.is_none_or(|took| took > SERVED_BY) {
            let late = took.map_or("never came".to_owned(), |took| {
                format!("came after {:.3} s", took.as_secs_f64())
            });
            let words = format!(
                "{} {} asked for at {:.3} s {late}; meanwhile: {}",
                probe.kind,
                probe.mark,
                probe.asked.as_secs_f64(),
                meanwhile(&history.spells, probe.asked)
            );
            j.accuse(Rule::Delayed, words);
        }
        let times = j.figures.served.entry(probe.kind).or_default();
        times.push(took.unwrap_or(Duration::MAX));
    }
    let mut slow = Vec::new();
    for (kind, times) in &mut j.figures.served {
        times.sort_unstable();
        let p99 = times[(times.len() - 1) * 99 / 100];
        if times.len() >= PROBES_LEAST && p99 > SERVED_BY_MOSTLY {
            slow.push(format!(
                "{kind}: one in a hundred of {} took longer than {SERVED_BY_MOSTLY:?}",
                times.len()
            ));
        }
    }
    for words in slow {
        j.accuse(Rule::Delayed, words);
    }
}

/// What bad tenants did at that time.
fn meanwhile(spells: &[Spell], at: Moment) -> String {
    let then = spells
        .iter()
        .filter(|s| s.kind == "bad tenant" && s.from <= at + SERVED_BY && at <= s.to);
    let then: Vec<&str> = then.map(|spell| spell.what.as_str()).collect();
    if then.is_empty() {
        "nothing".to_owned()
    } else {
        then.join(", ")
    }
}
