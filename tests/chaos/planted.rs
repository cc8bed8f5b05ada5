//! The checker of the checker: a run without faults has nothing to blame and not one repeat. Then a bug is planted in its
//! records, one of each kind, and each must be found.

use std::time::Duration;

use crate::{
    checker::{Rule, judge},
    history::{History, Outcome, Probe, Request, SecretLife},
    installation::Installation,
    plan::Plan,
    runs,
};

/// The start, until an event was replayed, and a little.
const QUIET: Duration = Duration::from_secs(6);

fn accepted(request: &Request) -> bool {
    request.status.is_some_and(|status| status / 100 == 2)
}

fn place_of(history: &History, wanted: impl Fn(&Request) -> bool) -> usize {
    history
        .requests
        .iter()
        .position(wanted)
        .expect("a request to plant the bug in")
}

/// Those that were made while nothing was done to the installation: the others are not judged.
fn calm_probes(history: &History, kind: &str) -> Vec<Probe> {
    let is_calm = |probe: &&Probe| probe.kind == kind && probe.asked > Duration::from_secs(2);
    history.probes.iter().filter(is_calm).cloned().collect()
}

fn calm_probe(history: &History, kind: &str) -> Probe {
    calm_probes(history, kind)
        .pop()
        .expect("a probe to plant the bug in")
}

fn request_of<'a>(history: &'a History, probe: &Probe) -> &'a Request {
    let wanted = |r: &&Request| (&r.mark, r.endpoint) == (&probe.mark, probe.endpoint);
    history.requests.iter().find(wanted).expect("its request")
}

fn delay(history: &mut History, probe: &Probe, time: Duration) {
    let of_probe = |r: &&mut Request| (&r.mark, r.endpoint) == (&probe.mark, probe.endpoint);
    for request in history.requests.iter_mut().filter(of_probe) {
        request.at += time;
        request.ended += time;
    }
}

type Plant = fn(&mut History);

/// A bug of each kind, as it would look in the records.
const BUGS: &[(&str, Rule, Plant)] = &[
    (
        "an event is skipped: it was never sent, and nothing knows of it",
        Rule::Lost,
        |history| {
            let at = place_of(history, accepted);
            let (mark, endpoint) = (history.requests[at].mark.clone(), history.requests[at].endpoint);
            history
                .requests
                .retain(|r| (&r.mark, r.endpoint) != (&mark, endpoint));
            history.stored.deliveries.remove(&(mark, endpoint));
        },
    ),
    (
        "an event is skipped, and recorded as delivered",
        Rule::Lost,
        |history| {
            let at = place_of(history, accepted);
            let (mark, endpoint) = (history.requests[at].mark.clone(), history.requests[at].endpoint);
            history
                .requests
                .retain(|r| (&r.mark, r.endpoint) != (&mark, endpoint));
        },
    ),
    ("a committed event is gone", Rule::Lost, |history| {
        let mark = history.requests[place_of(history, accepted)].mark.clone();
        history.requests.retain(|r| r.mark != mark);
        history.stored.deliveries.retain(|(m, _), _| *m != mark);
        history.stored.bodies.remove(&mark);
    }),
    (
        "a dead delivery is not among the dead letters",
        Rule::Lost,
        |history| {
            let deliveries = &mut history.stored.deliveries;
            let delivery = deliveries
                .values_mut()
                .find(|d| !d.attempts.is_empty())
                .expect("one");
            if let Some(last) = delivery
                .attempts
                .iter_mut()
                .find(|attempt| attempt.ended.is_some())
            {
                last.ended = Some("dead".to_owned());
            }
        },
    ),
    ("a rolled-back event is sent", Rule::Phantom, |history| {
        let mark = history.requests[place_of(history, accepted)].mark.clone();
        let transaction = history
            .transactions
            .iter_mut()
            .find(|t| t.events.iter().any(|e| e.mark == mark));
        transaction.expect("its transaction").outcome = Outcome::RolledBack;
    }),
    (
        "an event goes to an endpoint that did not ask for it",
        Rule::Phantom,
        |history| {
            let of = |tenant| history.endpoints.iter().position(|life| life.tenant == tenant);
            let (acme, beta) = (of("acme").expect("one"), of("beta").expect("one"));
            let at = place_of(history, |r| r.endpoint == acme);
            history.requests[at].endpoint = beta;
        },
    ),
    ("half a transaction is there", Rule::Torn, |history| {
        let transaction = history
            .transactions
            .iter_mut()
            .find(|t| t.events.len() > 1 && t.outcome == Outcome::Committed)
            .expect("one of several events");
        transaction.outcome = Outcome::Unknown;
        let mark = transaction.events[0].mark.clone();
        history.stored.bodies.remove(&mark);
        history.stored.deliveries.retain(|(m, _), _| *m != mark);
        history.requests.retain(|r| r.mark != mark);
    }),
    ("other bytes are sent than were stored", Rule::Body, |history| {
        let at = place_of(history, accepted);
        let mut body = history.requests[at].body.to_vec();
        body[2] ^= 1;
        history.requests[at].body = body.into();
    }),
    ("a signature is wrong", Rule::Signature, |history| {
        let at = place_of(history, accepted);
        let wrong = history.requests[at].signature.replace(['a', '0'], "f");
        history.requests[at].signature = wrong;
    }),
    ("a signature is from another time", Rule::Signature, |history| {
        let at = place_of(history, accepted);
        history.requests[at].unix += 120;
    }),
    ("a secret signs that was retired", Rule::Signature, |history| {
        let at = place_of(history, accepted);
        let (unix, endpoint) = (history.requests[at].unix, history.requests[at].endpoint);
        history.endpoints[endpoint].secrets[0].retires_unix = Some(unix - 10);
    }),
    ("the new secret does not sign", Rule::Signature, |history| {
        let endpoint = history.requests[place_of(history, accepted)].endpoint;
        history.endpoints[endpoint].secrets.push(SecretLife {
            secret: "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA".to_owned(),
            asked: Duration::ZERO,
            in_effect: Some(Duration::ZERO),
            retires_unix: None,
        });
    }),
    ("an event is sent twice", Rule::Repeated, |history| {
        let again = history.requests[place_of(history, accepted)].clone();
        history.requests.push(again);
    }),
    ("a bulkhead is exceeded by one", Rule::Bulkhead, |history| {
        let endpoint = history.requests[place_of(history, accepted)].endpoint;
        let bulkhead = history.endpoints[endpoint].bulkhead;
        let mut at_once = 0;
        for request in history.requests.iter_mut().filter(|r| r.endpoint == endpoint) {
            if at_once <= bulkhead {
                (request.at, request.ended) = (Duration::from_secs(1), Duration::from_secs(2));
                at_once += 1;
            }
        }
        assert_eq!(at_once, bulkhead + 1, "there are enough requests");
    }),
    ("two events of a key change places", Rule::Order, |history| {
        let ordered: Vec<usize> = (0..history.endpoints.len())
            .filter(|n| history.endpoints[*n].ordered)
            .collect();
        let first = place_of(history, |r| {
            ordered.contains(&r.endpoint) && r.sequence.as_ref().is_some_and(|(_, n)| *n == 1) && accepted(r)
        });
        let (endpoint, key) = {
            let request = &history.requests[first];
            (
                request.endpoint,
                request.sequence.as_ref().map(|(key, _)| key.clone()),
            )
        };
        let second = history
            .requests
            .iter()
            .rposition(|r| {
                r.endpoint == endpoint && r.sequence.as_ref().map(|(k, _)| k) == key.as_ref() && accepted(r)
            })
            .expect("a later one of the same key");
        assert_ne!(first, second, "the key has more than one event");
        let (a, b) = (history.requests[first].at, history.requests[second].at);
        (history.requests[first].at, history.requests[second].at) = (b, a);
    }),
    ("a delivery waits for ever", Rule::Stuck, |history| {
        let delivery = history.stored.deliveries.values_mut().next().expect("one");
        delivery.waiting = true;
        delivery.attempts.iter_mut().for_each(|a| a.ended = None);
    }),
    ("a delivery is in two places", Rule::Stuck, |history| {
        let delivery = history
            .stored
            .deliveries
            .values_mut()
            .find(|d| d.attempts.iter().any(|a| a.ended.is_some()));
        delivery.expect("one that ended").queued = true;
    }),
    (
        "an attempt is recorded that nobody saw",
        Rule::Record,
        |history| {
            let delivery = history
                .stored
                .deliveries
                .values_mut()
                .find(|d| !d.attempts.is_empty())
                .expect("one");
            let mut made_up = delivery.attempts[0].clone();
            made_up.number += 20;
            made_up.ended = None;
            delivery.attempts.push(made_up);
        },
    ),
    (
        "an answer is recorded that was not given",
        Rule::Record,
        |history| {
            let delivery = history
                .stored
                .deliveries
                .values_mut()
                .find(|d| !d.attempts.is_empty())
                .expect("one");
            delivery.attempts[0].status = Some(299);
        },
    ),
    (
        "a request starts after the endpoint was deleted",
        Rule::Late,
        |history| {
            let endpoint = history.requests[place_of(history, accepted)].endpoint;
            let last = history.requests.iter().filter(|r| r.endpoint == endpoint);
            let last = last.map(|r| r.at).max().expect("one");
            let confirmed = last - Duration::from_secs(1);
            history.endpoints[endpoint].deleted = Some((confirmed, Some(confirmed)));
        },
    ),
    ("a request starts during a pause", Rule::Late, |history| {
        let endpoint = history.requests[place_of(history, accepted)].endpoint;
        history.endpoints[endpoint]
            .pauses
            .push((Duration::ZERO, Duration::MAX));
    }),
    ("one emit became two events", Rule::Doubled, |history| {
        let mark = history.requests[place_of(history, accepted)].mark.clone();
        history.stored.copies.insert(mark, 2);
    }),
    ("something of some tenant is left over", Rule::Stuck, |history| {
        history.undrained = Some("400 deliveries wait".to_owned());
    }),
    (
        "a steady tenant's event comes five seconds late",
        Rule::Delayed,
        |history| {
            let probe = calm_probe(history, "emit by SQL");
            delay(history, &probe, Duration::from_secs(5));
        },
    ),
    ("a steady tenant's replay never comes", Rule::Delayed, |history| {
        let probe = calm_probe(history, "replay");
        history
            .requests
            .retain(|r| (&r.mark, r.replay) != (&probe.mark, true));
    }),
    (
        "an emit by HTTP is refused while the installation is left alone",
        Rule::Delayed,
        |history| {
            let probe = calm_probe(history, "emit by HTTP");
            history.requests.retain(|r| r.mark != probe.mark);
        },
    ),
    (
        "a slow receiver waits behind one that is slower",
        Rule::Delayed,
        |history| {
            let probe = calm_probe(history, "slow receiver");
            delay(history, &probe, Duration::from_secs(20));
        },
    ),
    (
        "one in fifty of a steady tenant's events takes two seconds",
        Rule::Delayed,
        |history| {
            let probes = calm_probes(history, "emit by SQL");
            // As many as a run of minutes has.
            for (number, probe) in probes.iter().cycle().take(500).enumerate() {
                let mark = format!("{}-again-{number}", probe.mark);
                let mut request = request_of(history, probe).clone();
                request.mark.clone_from(&mark);
                if number % 50 == 0 {
                    request.at += Duration::from_secs(2);
                }
                history.requests.push(request);
                history.probes.push(Probe {
                    mark,
                    ..probe.clone()
                });
            }
        },
    ),
    ("the sweep found what the tail missed", Rule::Alarm, |history| {
        history
            .alarms
            .push("the sweep found rows that the tail had missed".to_owned());
    }),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_fault_nothing_is_repeated_and_every_planted_bug_is_caught() {
    let _alone = runs::alone().await;
    let it = Installation::start_whole(None).await;
    let history = runs::run(&it, &Plan::none(1), QUIET).await;
    let judgement = judge(&history);
    println!("without faults\n{judgement}");
    assert!(judgement.violations.is_empty(), "{judgement}");
    assert_eq!(judgement.figures.repeats_explained, 0, "no fault, no repeat");
    assert_eq!(judgement.figures.lost, 0);
    for (bug, rule, plant) in BUGS {
        let mut planted = history.clone();
        plant(&mut planted);
        let broken = judge(&planted).broken();
        assert!(
            broken.contains(rule),
            "{bug}: the checker must find {rule:?}, found {broken:?}"
        );
    }
}
