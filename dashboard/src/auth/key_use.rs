//! When each API key was last used, for the list of keys.
//! Invariant: it costs no request anything. A key is written at most once a minute by a process, in the background.

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    Shared,
    tables::api_keys::{self, KeyRow},
};

const WRITE_EVERY: Duration = Duration::from_secs(60);
/// Keys remembered. With more, all are forgotten and may be written again early.
const KEYS_MAX: usize = 10_000;

static WRITTEN: LazyLock<Mutex<Written>> = LazyLock::new(Mutex::default);

/// When this process last wrote each key, by its number.
#[derive(Default)]
struct Written(HashMap<i32, Instant>);

impl Written {
    /// Whether to write it now.
    fn is_due(&mut self, key: i32, now: Instant) -> bool {
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < WRITE_EVERY;
        if self.0.get(&key).is_some_and(is_recent) {
            return false;
        }
        if self.0.len() >= KEYS_MAX {
            self.0.retain(|_, at| is_recent(at));
        }
        if self.0.len() >= KEYS_MAX {
            self.0.clear();
        }
        self.0.insert(key, now);
        true
    }
}

pub(super) fn note(app: &Shared, key: &KeyRow) {
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    if !written.is_due(key.id, Instant::now()) {
        return;
    }
    let (app, id) = (app.clone(), key.id);
    tokio::spawn(async move {
        if let Err(error) = api_keys::note_use(&app.pool, id, WRITE_EVERY.as_secs_f64()).await {
            tracing::debug!(%error, "failed to record the use of an API key");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_written_once_a_minute_and_memory_is_bounded() {
        let mut written = Written::default();
        let start = Instant::now();
        assert!(written.is_due(1, start));
        assert!(!written.is_due(1, start + Duration::from_secs(59)));
        assert!(written.is_due(1, start + WRITE_EVERY));
        for key in 0..3 * KEYS_MAX as i32 {
            written.is_due(key, start + WRITE_EVERY);
        }
        assert!(written.0.len() <= KEYS_MAX);
    }
}
