//! The `postrider` program. What it can do is in `command_line.rs`.

use std::process::ExitCode;

fn main() -> ExitCode {
    postrider::command_line::run()
}
