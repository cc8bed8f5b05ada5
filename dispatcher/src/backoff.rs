//! Delays between retries: each twice as long as the one before, up to a limit.

use std::time::Duration;

/// A constant of this type says how a task backs off; a copy of it counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) const fn new(first: Duration, max: Duration) -> Self {
        Self {
            first,
            max,
            next: first,
        }
    }

    /// The delay before the next retry.
    pub(crate) fn delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = self.after(delay);
        delay
    }

    /// The delay that follows another.
    pub(crate) fn after(self, before: Duration) -> Duration {
        (before * 2).clamp(self.first, self.max)
    }

    /// After a success.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_limit() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(100), ms(350));
        assert_eq!(
            [(); 4].map(|()| backoff.delay()),
            [ms(100), ms(200), ms(350), ms(350)]
        );
        backoff.reset();
        assert_eq!(backoff.delay(), ms(100));
        assert_eq!(backoff.after(Duration::ZERO), ms(100));
    }
}
