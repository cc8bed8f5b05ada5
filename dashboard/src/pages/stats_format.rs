//! Turns per-minute counters into what the pages show: totals, rates, percentiles, chart series and formatted numbers.
//! Pure functions; `tables::statistics` reads the counters.

use std::fmt::Display;

use chrono::{DateTime, TimeDelta, Utc};
use postrider_dispatcher::statistics::{BOUNDS_MS, BUCKETS, CLASSES, Class};

pub(crate) use crate::actions::numbers::{counted, grouped};
use crate::tables::{pending::Pending, statistics::CountRow};

/// The counters of a period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Totals {
    pub(crate) delivered: i64,
    pub(crate) retried: i64,
    pub(crate) dead: i64,
    pub(crate) classes: [i64; CLASSES],
    pub(crate) durations: [i64; BUCKETS],
}

impl Totals {
    fn include(&mut self, other: &Self) {
        self.delivered += other.delivered;
        self.retried += other.retried;
        self.dead += other.dead;
        for (sum, count) in self.classes.iter_mut().zip(other.classes) {
            *sum += count;
        }
        for (sum, count) in self.durations.iter_mut().zip(other.durations) {
            *sum += count;
        }
    }

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

    /// The share of successful attempts in percent, if there were any.
    pub(crate) fn success_percent(&self) -> Option<f64> {
        let attempts = self.attempts();
        (attempts > 0).then(|| 100.0 * self.delivered as f64 / attempts as f64)
    }

    /// The duration that this share of the attempts did not exceed. Durations are assumed to be evenly distributed
    /// within a bucket.
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

    /// Failures by class, most frequent first.
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

pub(crate) const fn class_label(class: Class) -> &'static str {
    match class {
        Class::Accepted => "Success (2xx)",
        Class::Redirected => "Redirect (3xx, not followed)",
        Class::ClientError => "Client error (4xx)",
        Class::ServerError => "Server error (5xx)",
        Class::NameNotFound => "DNS lookup failed",
        Class::ConnectionFailed => "Connection failed",
        Class::TlsFailed => "TLS error",
        Class::TimedOut => "Timeout",
        Class::InvalidResponse => "Invalid response",
        Class::Forbidden => "Address not allowed",
        Class::NotSent => "Not sent",
    }
}

/// The period of a chart, divided into equal steps.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) begin: DateTime<Utc>,
    pub(crate) step: TimeDelta,
    pub(crate) steps: Vec<Totals>,
}

impl Series {
    /// The last `count` steps up to now; the last one is still incomplete.
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
        self.steps.iter().for_each(|step| total.include(step));
        total
    }

    /// Those of another database. Its clock may be at another step.
    pub(crate) fn include(&mut self, other: &Self) {
        let later = (other.begin - self.begin).num_seconds() / self.step.num_seconds().max(1);
        for (index, step) in other.steps.iter().enumerate() {
            let index = usize::try_from(index as i64 + later).ok();
            if let Some(sum) = index.and_then(|index| self.steps.get_mut(index)) {
                sum.include(step);
            }
        }
    }

    pub(crate) fn at(&self, index: usize) -> DateTime<Utc> {
        self.begin + self.step * i32::try_from(index).unwrap_or_default()
    }
}

/// A count that may be known only roughly: `4,999`, `5,000+`, `about 12,000`.
pub(crate) fn format_pending(pending: Pending) -> String {
    match pending {
        Pending::Exactly(count) => grouped(count),
        Pending::AtLeast(count) => format!("{}+", grouped(count)),
        Pending::About(count) => {
            let unit = 10_i64.pow(count.max(1).ilog10().saturating_sub(1));
            format!("about {}", grouped((count + unit / 2) / unit * unit))
        }
    }
}

/// What to say beside a number of pending deliveries. Dispatchers report the oldest once a second, so it may already be
/// delivered: the number is newer.
pub(crate) fn backlog(oldest: Option<&str>, pending: Pending) -> String {
    match (pending, oldest) {
        (Pending::Exactly(0), _) => "no backlog".to_owned(),
        (_, Some(age)) => format!("oldest waiting {age}"),
        (_, None) => "waiting for a retry or on hold".to_owned(),
    }
}

/// A duration as `8.0 ms`, `120 ms`, `1.2 s` or `12 s`.
pub(crate) fn format_ms(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1_000.0 => format!("{ms:.0} ms"),
        ms if ms < 10_000.0 => format!("{:.1} s", ms / 1_000.0),
        ms => format!("{:.0} s", ms / 1_000.0),
    }
}

/// A measured duration to the millisecond: `12,345 ms`.
pub(crate) fn format_exact_ms(ms: impl Display) -> String {
    format!("{} ms", grouped(ms))
}

/// A rate per second: `1,200`, `12.5`, `0.25`.
pub(crate) fn format_rate(per_second: f64) -> String {
    match per_second {
        rate if rate >= 100.0 => grouped(rate.round() as i64),
        rate if rate >= 10.0 => format!("{rate:.1}"),
        rate => format!("{rate:.2}"),
    }
}

/// A size on disk: `1.5 MB`.
pub(crate) fn format_bytes(bytes: &i64) -> String {
    let units = [
        (1_000_000_000_000, "TB"),
        (1_000_000_000, "GB"),
        (1_000_000, "MB"),
        (1_000, "kB"),
    ];
    match units.into_iter().find(|(unit, _)| bytes >= unit) {
        Some((unit, name)) => format!("{:.1} {name}", *bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

/// A percentage. Anything below 100 is never rounded up to 100.
pub(crate) fn format_percent(percent: f64) -> String {
    match percent {
        0.0 => "0%".to_owned(),
        percent if percent >= 100.0 => "100%".to_owned(),
        percent if percent > 99.9 => format!("{:.2}%", percent.min(99.99)),
        percent => format!("{percent:.1}%"),
    }
}

/// The same for seconds, as the database measures them.
pub(crate) fn format_seconds(seconds: &f64) -> String {
    format_duration(TimeDelta::seconds(*seconds as i64))
}

/// A longer duration in at most two units: `4 min 12 s`.
pub(crate) fn format_duration(time: TimeDelta) -> String {
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
    fn numbers_are_formatted() {
        assert_eq!(format_pending(Pending::Exactly(4_999)), "4,999");
        assert_eq!(format_pending(Pending::AtLeast(5_000)), "5,000+");
        assert_eq!(format_pending(Pending::About(123_456)), "about 120,000");
        assert_eq!(format_pending(Pending::About(0)), "about 0");
        assert_eq!(backlog(Some("2 s"), Pending::Exactly(0)), "no backlog");
        assert_eq!(
            backlog(Some("2 s"), Pending::AtLeast(5_000)),
            "oldest waiting 2 s"
        );
        assert_eq!(
            backlog(None, Pending::Exactly(1)),
            "waiting for a retry or on hold"
        );
        assert_eq!(format_percent(99.999), "99.99%");
        assert_eq!(
            (format_percent(0.0), format_percent(100.0)),
            ("0%".into(), "100%".into())
        );
        assert_eq!(format_ms(1_240.0), "1.2 s");
        assert_eq!(format_duration(TimeDelta::seconds(3_725)), "1 h 2 min");
        assert_eq!(format_seconds(&61.7), "1 min 1 s");
        assert_eq!(format_exact_ms(12_345), "12,345 ms");
        assert_eq!(
            (format_rate(0.25), format_rate(1_200.0)),
            ("0.25".into(), "1,200".into())
        );
        assert_eq!(
            (format_bytes(&999), format_bytes(&1_500_000)),
            ("999 B".into(), "1.5 MB".into())
        );
    }
}
