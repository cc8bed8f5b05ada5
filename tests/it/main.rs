//! End-to-end tests: the real program as processes, a real Postgres, receivers that record what reached them.
//! One binary, so that one database server serves them all. A file for each behaviour.

#[allow(dead_code, reason = "shared with the other test program, which uses the rest")]
mod support;

mod access;
mod admin_pages;
mod at_rest;
mod batch;
mod browser;
mod bulkhead;
mod certificates;
mod crash;
mod delivery;
mod delivery_pages;
mod description;
mod egress;
mod emit;
mod endpoint_pages;
mod erasure;
mod export;
mod filters;
mod first_run;
mod fleet;
mod grpc;
mod hostile_input;
mod hostile_pages;
mod idempotency;
mod listen;
mod operational;
mod order;
mod outbox;
mod overview;
mod pages;
mod people;
mod planned_rotation;
mod portal;
mod producers;
mod properties;
mod proxied;
mod rate;
mod receivers;
mod refusals;
mod replays;
mod retention;
mod retry_rules;
mod roles;
mod rotation;
mod schemas;
mod screenshots;
mod strangers;
mod supply_chain;
mod tail;
mod tools;
mod trials;
mod types_command;
mod versions;
