//! Postgres snapshots as values: what became visible between two of them. Pure.
//! Invariant: compare only snapshots of one connection. After a crash Postgres hands out xids again.

use std::ops::Range;

/// `xmin:xmax:xip,xip,…` of `pg_current_snapshot()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    text: String,
    /// Every transaction from here on had not begun.
    xmax: u64,
    /// Those below `xmax` that were still running, ascending.
    running: Vec<u64>,
}

impl Snapshot {
    /// Of a time before all transactions: everything is new since.
    pub(crate) const fn nothing() -> Self {
        Self {
            text: String::new(),
            xmax: 0,
            running: Vec::new(),
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, ':');
        let _xmin: u64 = parts.next()?.parse().ok()?;
        let xmax = parts.next()?.parse().ok()?;
        let running = match parts.next()? {
            "" => Vec::new(),
            list => list.split(',').map(str::parse).collect::<Result<_, _>>().ok()?,
        };
        Some(Self {
            text: text.to_owned(),
            xmax,
            running,
        })
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    /// The transactions whose rows may be new in any later snapshot: each of those that run, and all that have not begun.
    pub(crate) fn later(&self) -> Vec<Range<u64>> {
        let running = self.running.iter().map(|xid| *xid..xid + 1);
        running.chain(std::iter::once(self.xmax..u64::MAX)).collect()
    }

    /// The transactions whose rows are new since an earlier snapshot, as ascending ranges: those that ran then and have
    /// ended, and those that began since and have ended. The rows of one that still runs are left out: they would be scanned
    /// for nothing now, and are new once it has ended.
    pub(crate) fn since(&self, before: &Self) -> Vec<Range<u64>> {
        let is_running = |xid: &u64| self.running.binary_search(xid).is_ok();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for xid in before.running.iter().copied().filter(|xid| !is_running(xid)) {
            match ranges.last_mut() {
                Some(last) if last.end == xid => last.end = xid + 1,
                _ => ranges.push(xid..xid + 1),
            }
        }
        let mut from = before.xmax;
        let began = self.running.iter().copied().filter(|xid| *xid >= before.xmax);
        for running in began.chain([self.xmax]) {
            if from < running {
                ranges.push(from..running);
            }
            from = running + 1;
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn snapshot(text: &str) -> Snapshot {
        Snapshot::parse(text).expect("a snapshot")
    }

    #[test]
    fn a_transaction_is_new_when_it_began_or_ended_since() {
        let before = snapshot("10:20:10,12,15");
        let after = snapshot("12:25:12,22");
        assert_eq!(after.since(&before), [10..11, 15..16, 20..22, 23..25]);
        assert_eq!(after.since(&after), []);
        assert_eq!(
            snapshot("20:23:20,22").since(&snapshot("18:20:18,19")),
            [18..20, 21..22]
        );
    }

    #[test]
    fn everything_that_has_ended_is_new_since_nothing() {
        assert_eq!(
            snapshot("10:20:10,12").since(&Snapshot::nothing()),
            [0..10, 11..12, 13..20]
        );
    }

    #[test]
    fn what_ran_or_had_not_begun_may_be_new_later() {
        assert_eq!(snapshot("10:20:10,12").later(), [10..11, 12..13, 20..u64::MAX]);
    }

    #[test]
    fn malformed_text_is_no_snapshot() {
        for bad in ["", "1", "1:2", "a:b:", "1:2:x", "1:2:3,"] {
            assert_eq!(Snapshot::parse(bad), None, "{bad}");
        }
    }

    proptest! {
        /// Commits in any order, reads in between: each committed transaction is seen exactly once.
        #[test]
        fn every_commit_is_seen_exactly_once(steps in proptest::collection::vec(0_u8..4, 1..200)) {
            let (mut next, mut running, mut committed) = (1_u64, Vec::<u64>::new(), Vec::<u64>::new());
            let mut seen = Vec::new();
            let take = |next: u64, running: &[u64]| {
                let list: Vec<String> = running.iter().map(u64::to_string).collect();
                snapshot(&format!("{}:{next}:{}", running.first().unwrap_or(&next), list.join(",")))
            };
            let mut before = take(next, &running);
            for (i, step) in steps.into_iter().enumerate() {
                match step {
                    0 | 1 => { running.push(next); next += 1; }
                    2 if !running.is_empty() => {
                        let ended = running.remove(i % running.len());
                        committed.push(ended);
                    }
                    _ => {
                        let now = take(next, &running);
                        let new = now.since(&before);
                        seen.extend(committed.iter().copied().filter(|xid| new.iter().any(|range| range.contains(xid))));
                        before = now;
                    }
                }
            }
            let now = take(next, &running);
            let new = now.since(&before);
            seen.extend(committed.iter().copied().filter(|xid| new.iter().any(|range| range.contains(xid))));
            seen.sort_unstable();
            committed.sort_unstable();
            prop_assert_eq!(seen, committed);
        }
    }
}
