//! The composition root: reads the settings, assembles the parts and starts them.
//! Invariant: only this crate reads the environment, and it decides nothing about deliveries.

mod admin;
mod banner;
mod cells;
mod command_line;
mod connect;
mod data_dir;
mod demo;
mod doctor;
mod health;
mod health_command;
mod log;
mod machine;
mod master_key;
mod metrics;
mod open_cell;
mod parts;
mod process_metrics;
mod roles;
mod settings;
mod traces;
mod up;

use std::process::ExitCode;

fn main() -> ExitCode {
    command_line::run()
}
