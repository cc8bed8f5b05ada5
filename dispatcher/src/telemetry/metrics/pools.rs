//! Connections of each pool of this process, sampled on scrape: a few atomics and no database.

use std::sync::{Mutex, MutexGuard, PoisonError};

use metrics::Gauge;
use sqlx::PgPool;

use super::labelled_gauge;

struct Watched {
    name: &'static str,
    pool: PgPool,
    idle: Gauge,
    in_use: Gauge,
}

static WATCHED: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

fn watched() -> MutexGuard<'static, Vec<Watched>> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a pool under a name. A later pool with the same name replaces it.
pub fn watch(name: &'static str, pool: &PgPool) {
    let connections = |state| {
        labelled_gauge(
            "postrider_pool_connections",
            "Database connections by pool and state",
            &[("pool", name), ("state", state)],
        )
    };
    labelled_gauge(
        "postrider_pool_connections_max",
        "Maximum connections of a pool",
        &[("pool", name)],
    )
    .set(f64::from(pool.options().get_max_connections()));
    let mut watched = watched();
    watched.retain(|one| one.name != name);
    watched.push(Watched {
        name,
        pool: pool.clone(),
        idle: connections("idle"),
        in_use: connections("in_use"),
    });
}

pub fn sample() {
    for one in watched().iter() {
        let idle = one.pool.num_idle();
        one.idle.set(idle as f64);
        // The two are read one after the other: a connection may have been returned in between.
        one.in_use
            .set((one.pool.size() as usize).saturating_sub(idle) as f64);
    }
}
