//! End-to-end tests: the real program as processes, a real Postgres, receivers that record what reached them.
//! One binary, so that one database server serves them all. A file for each behaviour.

mod support;

mod at_rest;
mod batch;
mod bulkhead;
mod crash;
mod delivery;
mod description;
mod emit;
mod filters;
mod first_run;
mod fleet;
mod grpc;
mod idempotency;
mod listen;
mod order;
mod outbox;
mod pages;
mod planned_rotation;
mod producers;
mod rate;
mod receivers;
mod refusals;
mod retry_rules;
mod roles;
mod rotation;
mod schemas;
mod tail;
mod tools;
mod trials;
mod types_command;
