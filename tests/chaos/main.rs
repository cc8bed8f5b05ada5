//! The machine that tries to make Postrider lose an event: a whole installation, producers that never stop, faults from
//! a seeded plan, and a checker that proves every promise from what the receivers saw.
//!
//! `POSTRIDER_CHAOS_SEED` and `POSTRIDER_CHAOS_SECONDS` choose the plan; `make chaos SEED=… MINUTES=…` sets them.

#![allow(clippy::disallowed_methods)]

#[path = "../it/support/mod.rs"]
#[allow(
    dead_code,
    unused_imports,
    reason = "shared with the other test program, which uses the rest"
)]
mod support;

mod bad_tenants;
mod cells;
mod cells_measured;
mod checker;
mod failover;
mod history;
mod installation;
mod machine;
mod neighbours;
mod nemesis;
mod operations;
mod overload;
mod patroni;
mod plan;
mod planted;
mod pooler;
mod producers;
mod proxy;
mod receivers;
mod runs;
mod soak;
