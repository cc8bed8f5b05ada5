//! This process's right to act, by its own monotonic clock. Renewed by `shards.rs`.
//! Invariant: it is over here before anybody else may take what it covers.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use tokio_util::sync::CancellationToken;

#[derive(Debug, Clone)]
pub(crate) struct Lease(Arc<Mutex<Term>>);

#[derive(Debug)]
struct Term {
    until: Instant,
    over: CancellationToken,
}

impl Lease {
    /// Not valid until it is first extended.
    pub(crate) fn new() -> Self {
        let over = CancellationToken::new();
        over.cancel();
        Self(Arc::new(Mutex::new(Term {
            until: Instant::now(),
            over,
        })))
    }

    fn term(&self) -> MutexGuard<'_, Term> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn is_valid(&self) -> bool {
        let term = self.term();
        Instant::now() < term.until && !term.over.is_cancelled()
    }

    /// Ends when the term that runs now is over.
    pub(crate) async fn over(&self) {
        let over = self.term().over.clone();
        over.cancelled().await;
    }

    /// Answers whether a new term began, because the one before was over.
    pub(crate) fn extend(&self, until: Instant) -> bool {
        let mut term = self.term();
        let renewed = term.over.is_cancelled();
        if renewed {
            term.over = CancellationToken::new();
        }
        term.until = until;
        renewed
    }

    /// Ends the term if its time has come; answers whether it did.
    pub(crate) fn expire(&self, now: Instant) -> bool {
        let term = self.term();
        let ends = now >= term.until && !term.over.is_cancelled();
        if ends {
            term.over.cancel();
        }
        ends
    }

    /// For good: this process is leaving.
    pub(crate) fn end(&self) {
        self.term().over.cancel();
    }

    pub(crate) fn until(&self) -> Instant {
        self.term().until
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_lease_ends_by_the_clock_even_before_it_is_expired() {
        let lease = Lease::new();
        assert!(!lease.is_valid());
        assert!(lease.extend(Instant::now() + Duration::from_secs(60)));
        assert!(lease.is_valid());
        assert!(!lease.extend(Instant::now()));
        assert!(!lease.is_valid(), "its time is over although nobody has said so");
        assert!(lease.expire(Instant::now()) && !lease.expire(Instant::now()));
        assert!(
            lease.extend(Instant::now() + Duration::from_secs(60)),
            "a new term"
        );
        assert!(lease.is_valid());
    }
}
