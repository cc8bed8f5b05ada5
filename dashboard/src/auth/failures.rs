//! Writes failed sign-ins to the audit log.
//! Invariant: strangers can't flood it. The first failure of a login and address is written immediately; later ones
//! within a minute are counted and written as one entry, and so are those of all logins and addresses beyond a limit.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::Actor;
use crate::{
    App,
    tables::audit::{self, Action, Entry},
};

const WINDOW: Duration = Duration::from_secs(60);
/// Logins and addresses with entries of their own in one window.
const NAMED_MAX: usize = 20;
const ACTOR: &str = "anonymous";
/// A mistyped login may be a password, so only logins that exist are stored. No login contains a space.
const UNKNOWN_LOGIN: &str = "unknown login";
const SEVERAL_LOGINS: &str = "several logins";

static WINDOW_NOW: LazyLock<Mutex<Window>> = LazyLock::new(Mutex::default);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Who {
    /// None if the login does not exist.
    login: Option<String>,
    address: Option<IpAddr>,
}

#[derive(Default)]
struct Window {
    /// Failures after the first entry.
    repeated: HashMap<Who, u64>,
    others: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct Failed {
    subject: String,
    detail: Value,
}

impl Window {
    /// Returns the entry to write immediately, if any.
    fn note(&mut self, who: Who) -> Option<Failed> {
        if let Some(count) = self.repeated.get_mut(&who) {
            *count += 1;
            return None;
        }
        if self.repeated.len() >= NAMED_MAX {
            self.others += 1;
            return None;
        }
        let failed = who.failed(1);
        self.repeated.insert(who, 0);
        Some(failed)
    }

    /// Returns the counted failures and starts the next window.
    fn end(&mut self) -> Vec<Failed> {
        let ended = std::mem::take(self);
        let named = ended.repeated.into_iter().filter(|(_, count)| *count > 0);
        let mut failed: Vec<Failed> = named.map(|(who, count)| who.failed(count)).collect();
        if ended.others > 0 {
            failed.push(Failed {
                subject: SEVERAL_LOGINS.to_owned(),
                detail: json!({"attempts": ended.others}),
            });
        }
        failed
    }
}

impl Who {
    fn failed(&self, attempts: u64) -> Failed {
        Failed {
            subject: self.login.clone().unwrap_or_else(|| UNKNOWN_LOGIN.to_owned()),
            detail: json!({"address": self.address, "attempts": attempts}),
        }
    }
}

fn window() -> MutexGuard<'static, Window> {
    WINDOW_NOW.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `login` belongs to an existing person.
pub(super) async fn note(app: &App, login: Option<&str>, address: Option<IpAddr>) {
    let who = Who {
        login: login.map(str::to_owned),
        address,
    };
    let failed = window().note(who);
    write(app, failed.as_slice()).await;
}

/// Writes the counted failures at the end of each window and on shutdown.
pub(crate) async fn keep(app: Arc<App>, stop: CancellationToken) {
    let mut every = interval(WINDOW);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let stopped = tokio::select! {
            _ = every.tick() => false,
            () = stop.cancelled() => true,
        };
        let ended = window().end();
        write(&app, &ended).await;
        if stopped {
            return;
        }
    }
}

/// A database error must not change the result of a sign-in.
async fn write(app: &App, failed: &[Failed]) {
    for one in failed {
        if let Err(error) = write_one(app, one).await {
            tracing::warn!(%error, "could not write failed sign-ins to the audit log");
            return;
        }
    }
}

async fn write_one(app: &App, failed: &Failed) -> sqlx::Result<()> {
    let mut connection = app.pool.acquire().await?;
    let actor = Actor::new(ACTOR);
    let entry = Entry::new(&actor, Action::SignInFailed, None, &failed.subject).with(failed.detail.clone());
    audit::write(&mut connection, entry).await?;
    connection.done().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_fail_few_entries_are_written() {
        let mut window = Window::default();
        let who = |n: u8| Who {
            login: Some("ada".to_owned()),
            address: Some(IpAddr::from([192, 0, 2, n])),
        };
        let at_once: Vec<Failed> = (0..250)
            .flat_map(|n| [n, n, n])
            .filter_map(|n| window.note(who(n)))
            .collect();
        assert_eq!(at_once.len(), NAMED_MAX);
        assert_eq!(at_once[0].detail, json!({"address": "192.0.2.0", "attempts": 1}));
        let later = window.end();
        assert_eq!(later.len(), NAMED_MAX + 1);
        let total = |failed: &[Failed]| -> u64 {
            failed
                .iter()
                .filter_map(|one| one.detail["attempts"].as_u64())
                .sum()
        };
        assert_eq!(total(&at_once) + total(&later), 750, "none is lost");
        assert!(window.end().is_empty());
    }

    #[test]
    fn a_login_that_nobody_has_is_not_kept() {
        let who = Who {
            login: None,
            address: None,
        };
        let failed = Window::default().note(who).expect("an entry");
        assert_eq!(failed.subject, UNKNOWN_LOGIN);
    }
}
