//! Counts that were kept by the minute, put together for people: totals, rates, percentiles, and the steps of a chart.
//! Pure; where the counts come from is `tables::statistics`.

use std::borrow::Borrow;

use chrono::{DateTime, TimeDelta, Utc};
use postrider_dispatcher::statistics::{BOUNDS_MS, BUCKETS, CLASSES, Class};

use crate::tables::statistics::CountRow;

/// What was counted in some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Totals {
    pub(crate) delivered: i64,
    pub(crate) retried: i64,
    pub(crate) dead: i64,
    pub(crate) classes: [i64; CLASSES],
    pub(crate) durations: [i64; BUCKETS],
}

impl Totals {
    pub(crate) fn add(&mut self, row: &CountRow) {
        self.delivered += i64::from(row.delivered);
        self.retried += i64::from(row.retried);
        self.dead += i64::from(row.dead);
        for (sum, count) in self.classes.iter_mut().zip(&row.classes) {
            *sum += i64::from(*count);
        }
        for (sum, count) in self.durations.iter_mut().zip(&row.durations) {
            *sum += i64::from(*count);
        }
    }

    pub(crate) fn attempts(&self) -> i64 {
        self.delivered + self.retried + self.dead
    }

    /// Of attempts, in percent; none when there were none.
    pub(crate) fn success_percent(&self) -> Option<f64> {
        let attempts = self.attempts();
        (attempts > 0).then(|| 100.0 * self.delivered as f64 / attempts as f64)
    }

    /// The duration that this share of the attempts did not exceed, read off the buckets: between a bucket's two ends
    /// it is taken as even.
    pub(crate) fn percentile_ms(&self, share: f64) -> Option<f64> {
        let total: i64 = self.durations.iter().sum();
        if total == 0 {
            return None;
        }
        let wanted = share * total as f64;
        let mut below = 0.0;
        for (index, count) in self.durations.iter().enumerate() {
            let count = *count as f64;
            if count > 0.0 && below + count >= wanted {
                let low = index
                    .checked_sub(1)
                    .map_or(0.0, |before| f64::from(BOUNDS_MS[before]));
                let high = BOUNDS_MS.get(index).map_or(low, |bound| f64::from(*bound));
                return Some(low + (high - low) * ((wanted - below) / count));
            }
            below += count;
        }
        BOUNDS_MS.last().map(|bound| f64::from(*bound))
    }

    /// Ways to fail that happened, the most frequent first.
    pub(crate) fn failures(&self) -> Vec<(Class, i64)> {
        let mut found: Vec<(Class, i64)> = Class::ALL
            .into_iter()
            .filter(|class| *class != Class::Accepted)
            .map(|class| (class, self.classes[class as usize]))
            .filter(|(_, count)| *count > 0)
            .collect();
        found.sort_by_key(|(_, count)| -count);
        found
    }
}

pub(crate) const fn class_words(class: Class) -> &'static str {
    match class {
        Class::Accepted => "Accepted (2xx)",
        Class::Redirected => "Redirect (3xx), not followed",
        Class::ClientError => "Refused (4xx)",
        Class::ServerError => "Server error (5xx)",
        Class::NameNotFound => "Name not found (DNS)",
        Class::ConnectionFailed => "Connection failed",
        Class::TlsFailed => "TLS failed",
        Class::TimedOut => "Timed out",
        Class::BrokenAnswer => "Broken answer",
        Class::Forbidden => "Address not allowed",
        Class::NotSent => "Not sent",
    }
}

/// A time that a chart shows, in equal steps.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) begin: DateTime<Utc>,
    pub(crate) step: TimeDelta,
    pub(crate) steps: Vec<Totals>,
}

impl Series {
    /// The last `count` steps up to now; the last one is under way.
    pub(crate) fn until(now: DateTime<Utc>, step: TimeDelta, count: usize) -> Self {
        let seconds = step.num_seconds().max(1);
        let last = now.timestamp().div_euclid(seconds) * seconds;
        let begin = last - seconds * (count as i64 - 1);
        Self {
            begin: DateTime::from_timestamp(begin, 0).unwrap_or(now),
            step,
            steps: vec![Totals::default(); count],
        }
    }

    pub(crate) fn add(&mut self, row: &CountRow) {
        let offset = (row.at - self.begin).num_seconds();
        let index = offset.div_euclid(self.step.num_seconds().max(1));
        if let Some(step) = usize::try_from(index)
            .ok()
            .and_then(|index| self.steps.get_mut(index))
        {
            step.add(row);
        }
    }

    pub(crate) fn total(&self) -> Totals {
        let mut total = Totals::default();
        for step in &self.steps {
            total.delivered += step.delivered;
            total.retried += step.retried;
            total.dead += step.dead;
            for (sum, count) in total.classes.iter_mut().zip(step.classes) {
                *sum += count;
            }
            for (sum, count) in total.durations.iter_mut().zip(step.durations) {
                *sum += count;
            }
        }
        total
    }

    pub(crate) fn at(&self, index: usize) -> DateTime<Utc> {
        self.begin + self.step * i32::try_from(index).unwrap_or_default()
    }
}

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(number: impl Borrow<i64>) -> String {
    let number = *number.borrow();
    let digits = number.unsigned_abs().to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if number < 0 { format!("-{text}") } else { text }
}

/// A duration for people: `8 ms`, `1.2 s`, `12 s`.
pub(crate) fn ms_words(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1_000.0 => format!("{ms:.0} ms"),
        ms if ms < 10_000.0 => format!("{:.1} s", ms / 1_000.0),
        ms => format!("{:.0} s", ms / 1_000.0),
    }
}

/// A share that is not whole is never shown as 100.
pub(crate) fn percent_words(percent: f64) -> String {
    match percent {
        percent if percent >= 100.0 => "100 %".to_owned(),
        percent if percent > 99.9 => format!("{:.2} %", percent.min(99.99)),
        percent => format!("{percent:.1} %"),
    }
}

/// How long something took or waits, in two units.
pub(crate) fn time_words(time: TimeDelta) -> String {
    let seconds = time.num_seconds().max(0);
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(at: i64, delivered: i32, bucket: usize) -> CountRow {
        let mut durations = vec![0; BUCKETS];
        durations[bucket] = delivered;
        CountRow {
            at: DateTime::from_timestamp(at, 0).expect("a time"),
            delivered,
            retried: 0,
            dead: 0,
            classes: vec![delivered],
            durations,
        }
    }

    #[test]
    fn a_percentile_lies_in_its_bucket() {
        let mut totals = Totals::default();
        assert_eq!(totals.percentile_ms(0.5), None);
        // 90 attempts of up to 10 ms, 10 of up to 1 s.
        totals.add(&row(0, 90, 5));
        totals.add(&row(0, 10, 17));
        let p50 = totals.percentile_ms(0.5).expect("a percentile");
        assert!((7.0..=10.0).contains(&p50), "{p50}");
        let p99 = totals.percentile_ms(0.99).expect("a percentile");
        assert!((700.0..=1_000.0).contains(&p99), "{p99}");
        assert_eq!(totals.success_percent(), Some(100.0));
    }

    #[test]
    fn rows_go_into_their_step_and_those_outside_nowhere() {
        let now = DateTime::from_timestamp(600, 0).expect("a time");
        let mut series = Series::until(now, TimeDelta::minutes(1), 5);
        assert_eq!(series.begin.timestamp(), 360);
        for at in [0, 359, 360, 419, 600, 660] {
            series.add(&row(at, 1, 0));
        }
        let counts: Vec<i64> = series.steps.iter().map(|step| step.delivered).collect();
        assert_eq!(counts, [2, 0, 0, 0, 1]);
        assert_eq!(series.total().delivered, 3);
    }

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(123), "123");
        assert_eq!(grouped(-1_000), "-1,000");
        assert_eq!(percent_words(99.999), "99.99 %");
        assert_eq!(percent_words(100.0), "100 %");
        assert_eq!(ms_words(1_240.0), "1.2 s");
        assert_eq!(time_words(TimeDelta::seconds(3_725)), "1 h 2 min");
    }
}
