//! The composition root: reads the settings, makes the parts and starts them.
//! Invariant: only this crate reads the environment, and it decides nothing about deliveries.

pub mod command_line;
pub mod embedded;
pub mod settings;

mod admin;
mod banner;
mod bench;
mod commands;
mod connect;
mod data_dir;
mod demo;
mod health;
mod log;
mod machine;
mod master_key;
mod metrics;
mod roles;
mod seed;
mod traces;
mod up;
mod verify;
