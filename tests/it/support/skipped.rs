//! Tests that can't run on this machine. The test harness knows only "passed" and "failed", so that they are named here: at
//! once, past the harness, and in the list that `make test` prints and counts at its end.

use std::{fs::OpenOptions, io::Write};

/// The file that the list is kept in, set by `make test`.
const LIST: &str = "POSTRIDER_TEST_SKIPPED";

/// Says that a test did not run, and why. The test returns after this.
pub(crate) fn skip(test: &str, reason: &str) {
    let line = format!("SKIPPED {test}: {reason}\n");
    // Not `eprintln!`, which the harness keeps to itself when a test passes.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(list) = std::env::var_os(LIST).filter(|list| !list.is_empty()) {
        let file = OpenOptions::new().create(true).append(true).open(list);
        file.and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("the list of skipped tests is written");
    }
}
