//! This process's permission to send, by its own monotonic clock. Renewed by `shards.rs`.
//! Invariant: it ends here before any other dispatcher may take over what it covers.

use std::{
    future::poll_fn,
    sync::{Arc, Mutex},
    task::Poll,
    time::Instant,
};

use tokio_util::sync::CancellationToken;

use crate::lock::lock;

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

    pub(crate) fn is_valid(&self) -> bool {
        self.is_valid_at(Instant::now())
    }

    pub(crate) fn is_valid_at(&self, now: Instant) -> bool {
        let term = lock(&self.0);
        now < term.until && !term.over.is_cancelled()
    }

    /// Permission for an attempt that starts under this term.
    pub(crate) fn under(&self, term: CancellationToken) -> SendPermission {
        SendPermission {
            lease: self.clone(),
            term,
        }
    }

    /// Returns a new term if one began because the previous one had ended, noticed or not. Attempts of the previous
    /// term stay cancelled: a process that was frozen may have lost its shards meanwhile.
    pub(crate) fn extend(&self, until: Instant) -> Option<CancellationToken> {
        self.extend_at(Instant::now(), until)
    }

    pub(crate) fn extend_at(&self, now: Instant, until: Instant) -> Option<CancellationToken> {
        let mut term = lock(&self.0);
        if now >= term.until {
            term.over.cancel();
        }
        term.until = until;
        let renewed = term.over.is_cancelled();
        if renewed {
            term.over = CancellationToken::new();
        }
        renewed.then(|| term.over.clone())
    }

    /// Ends the term if it has expired; returns whether it did.
    pub(crate) fn expire(&self, now: Instant) -> bool {
        let term = lock(&self.0);
        let ends = now >= term.until && !term.over.is_cancelled();
        if ends {
            term.over.cancel();
        }
        ends
    }

    /// Ends it for good: this process is shutting down.
    pub(crate) fn end(&self) {
        lock(&self.0).over.cancel();
    }

    pub(crate) fn until(&self) -> Instant {
        lock(&self.0).until
    }
}

/// Permission for one attempt: ends with the term it was started under, even if a new one has begun.
#[derive(Debug, Clone)]
pub struct SendPermission {
    lease: Lease,
    term: CancellationToken,
}

impl SendPermission {
    pub(crate) fn is_valid(&self) -> bool {
        // In this order: a new term may begin between the two, and it ends this one first.
        self.lease.is_valid() && !self.term.is_cancelled()
    }

    /// Polls a future only while the permission is valid, checking before every poll. A process frozen while
    /// connecting would otherwise send the request when it resumes, before anything notices that it is late.
    pub(crate) async fn only_while_valid<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        let guarded = poll_fn(|cx| {
            if self.is_valid() {
                work.as_mut().poll(cx).map(Some)
            } else {
                Poll::Ready(None)
            }
        });
        tokio::select! {
            done = guarded => done,
            () = self.term.cancelled() => None,
        }
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
        let first = lease.extend(Instant::now() + Duration::from_secs(60));
        assert!(lease.is_valid());
        assert!(lease.extend(Instant::now()).is_none());
        assert!(!lease.is_valid(), "its time is over although nobody has said so");
        assert!(lease.expire(Instant::now()) && !lease.expire(Instant::now()));
        assert!(first.is_some_and(|term| term.is_cancelled()));
        let second = lease.extend(Instant::now()).expect("a new term");
        let third = lease.extend(Instant::now() + Duration::from_secs(60));
        assert!(
            third.is_some(),
            "a new term, because the one before was over unsaid"
        );
        assert!(second.is_cancelled() && lease.is_valid());
    }

    #[test]
    fn what_was_begun_under_a_term_is_over_with_it_also_when_the_next_has_begun() {
        let (lease, start) = (Lease::new(), Instant::now());
        let minute = Duration::from_secs(60);
        let first = lease.extend_at(start, start + minute).expect("a term");
        let permission = lease.under(first);
        assert!(permission.is_valid());
        assert!(lease.extend_at(start + minute / 2, start + minute).is_none());
        assert!(permission.is_valid(), "renewed in time");
        let second = lease
            .extend_at(start + minute, start + 2 * minute)
            .expect("the next");
        assert!(lease.is_valid() && lease.under(second).is_valid());
        assert!(!permission.is_valid(), "the process slept through its end");
    }
}
