//! Connections of each pool of this process, sampled on scrape: a few atomics and no database.

use std::sync::Mutex;

use metrics::Gauge;
use sqlx::PgPool;

use super::labelled_gauge;
use crate::lock::lock;

struct Watched {
    name: &'static str,
    pool: PgPool,
    idle: Gauge,
    in_use: Gauge,
}

static WATCHED: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

/// Registers a pool under a name. A later pool with the same name replaces it.
pub fn watch(name: &'static str, pool: &PgPool) {
    let connections = |state| {
        let help = "Database connections by pool and state";
        labelled_gauge(
            "postrider_pool_connections",
            help,
            &[("pool", name), ("state", state)],
        )
    };
    let max = "postrider_pool_connections_max";
    let max = labelled_gauge(max, "Maximum connections of a pool", &[("pool", name)]);
    max.set(f64::from(pool.options().get_max_connections()));
    let mut watched = lock(&WATCHED);
    watched.retain(|one| one.name != name);
    watched.push(Watched {
        name,
        pool: pool.clone(),
        idle: connections("idle"),
        in_use: connections("in_use"),
    });
}

pub fn sample() {
    for one in lock(&WATCHED).iter() {
        let idle = one.pool.num_idle();
        one.idle.set(idle as f64);
        // The two are read one after the other: a connection may have been returned in between.
        let in_use = (one.pool.size() as usize).saturating_sub(idle);
        one.in_use.set(in_use as f64);
    }
}
