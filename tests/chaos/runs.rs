//! The runs: one with faults, one without.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::sync::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

use crate::{
    bad_tenants::Bad,
    checker::{Judgement, judge},
    history::History,
    installation::Installation,
    nemesis,
    plan::{Plan, VISITED},
    producers::{LARGE_SHARE, Producers, TENANTS},
};

/// What `make test` has time for.
const SECONDS: u64 = 24;
const SEED: u64 = 9;
const ENDPOINTS: usize = 6;
/// After the faults nothing may stand still for so long: a lease, the longest wait of a schedule, a full disk.
const DRAIN_MAX: Duration = Duration::from_secs(45);
const DISK_MEGABYTES_LEAST: u32 = 700;

static MACHINE: Mutex<()> = Mutex::const_new(());

/// Each run wants the machine for itself.
pub(crate) async fn alone() -> MutexGuard<'static, ()> {
    MACHINE.lock().await
}

pub(crate) fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect(name))
}

pub(crate) fn producers(it: &Installation, pause: Duration) -> Producers {
    Producers {
        time: it.time,
        journal: it.journal.clone(),
        database: it.producers_options(),
        apis: it.addresses.clone(),
        tenants: &TENANTS,
        large_share: LARGE_SHARE,
        persistent: false,
        pause,
        stop: CancellationToken::new(),
    }
}

/// Emits while the plan lasts, and at least for this long; heals, drains, and hands out what there is to judge.
pub(crate) async fn run(it: &Arc<Installation>, plan: &Plan, least: Duration) -> History {
    let producers = producers(it, Duration::from_millis(60));
    let emitting = producers.start(plan.seed, 2, 2);
    let steady = it.steady().map(|steady| producers.start_steady(&steady));
    let backup = tokio::spawn({
        let (it, stop) = (it.clone(), producers.stop.clone());
        async move { nemesis::hold_snapshot(&it, stop).await }
    });
    tokio::join!(nemesis::afflict(it, plan), tokio::time::sleep(least));
    it.heal().await;
    // Whoever came to nobody's notice gets one more event: an endpoint that a dispatcher forgot is found now.
    if it.steady().is_some() {
        for number in 0..VISITED.len() {
            nemesis::greet(it, number, usize::MAX).await;
        }
    }
    producers.stop.cancel();
    emitting.join_all().await;
    if let Some(steady) = steady {
        steady.join_all().await;
    }
    backup.await.expect("ended");
    match it.drained(DRAIN_MAX).await {
        Ok(took) => {
            println!("drained {:.1} s after the last fault", took.as_secs_f64());
            // Nothing comes after the end.
            let count = it.receivers.count();
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert_eq!(
                it.receivers.count(),
                count,
                "requests come although nothing waits"
            );
        }
        Err(waiting) => {
            println!("NOT DRAINED: {waiting}");
            *it.undrained.lock().expect("not poisoned") = Some(waiting);
        }
    }
    it.history().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_whatever_happens() {
    let _alone = alone().await;
    let seed = number("POSTRIDER_CHAOS_SEED", SEED);
    let seconds = number("POSTRIDER_CHAOS_SECONDS", SECONDS);
    let plan = Plan::make(seed, Duration::from_secs(seconds), ENDPOINTS, &bad_tenants());
    print!("{plan}");
    let disk = DISK_MEGABYTES_LEAST + seconds as u32 * 3;
    let it = Installation::start_whole(Some(disk)).await;
    let history = run(&it, &plan, Duration::ZERO).await;
    let judgement = judge(&history);
    println!("seed {seed}, {seconds} s\n{judgement}");
    if !judgement.violations.is_empty() {
        let report = report(&plan, &history, &judgement);
        panic!(
            "seed {seed} breaks {:?}; everything that was done and found is in {}",
            judgement.broken(),
            report.display()
        );
    }
}

/// All kinds, or those that are named: `Hoards,Lingers`; `none` for none.
fn bad_tenants() -> Vec<Bad> {
    match std::env::var("POSTRIDER_CHAOS_BAD").as_deref() {
        Err(_) | Ok("") => Bad::OF_CHAOS.to_vec(),
        Ok("none") => Vec::new(),
        Ok(names) => {
            let named = |name: &str| {
                Bad::named(name.trim()).unwrap_or_else(|| panic!("no bad tenant is called {name}"))
            };
            names.split(',').map(named).collect()
        }
    }
}

/// All of it: what was planned, what was done from when to when, what broke.
fn report(plan: &Plan, history: &History, judgement: &Judgement) -> PathBuf {
    use std::fmt::Write;
    let mut text = format!("{plan}\n{judgement}\nwhat was done:\n");
    for spell in &history.spells {
        let (from, to) = (spell.from.as_secs_f64(), spell.to.as_secs_f64());
        let _ = writeln!(text, "  {from:8.3} – {to:8.3} s  {}", spell.what);
    }
    text.push_str("\nwhat broke:\n");
    for violation in &judgement.violations {
        let _ = writeln!(text, "  {:?}: {}", violation.rule, violation.words);
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join(format!("chaos-{}.txt", plan.seed));
    std::fs::write(&file, text).expect("the report is written");
    file
}
