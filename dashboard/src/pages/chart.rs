//! Charts rendered as SVG on the server, so that they need no script. Colours are CSS classes and lengths are SVG
//! attributes, because the Content-Security-Policy forbids inline styles. Invariant: a chart contains no user input.

use std::fmt::{self, Write};

use askama::filters::HtmlSafe;
use chrono::{DateTime, Utc};
use postrider_dispatcher::statistics::BOUNDS_MS;

use crate::pages::stats_format::{Series, Totals, counted, format_ms, format_percent, grouped};

/// A drawing that stretches to its container. Labels are HTML beside it, so that they are not distorted.
#[derive(Debug, Clone)]
pub(crate) struct Svg(String);

impl fmt::Display for Svg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl HtmlSafe for Svg {}

/// A drawing with the label of its upper bound.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    pub(crate) svg: Svg,
    pub(crate) top: String,
}

const HEIGHT: f64 = 100.0;
/// The share of a step that its bar fills; the rest is the gap.
const BAR_SHARE: f64 = 0.78;

struct Drawing(String);

impl Drawing {
    fn begin(class: &str, label: &str, width: f64, height: f64) -> Self {
        let label = label.replace(['<', '>', '"', '&'], "");
        Self(format!(
            "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" preserveAspectRatio=\"none\" role=\"img\" \
             aria-label=\"{label}\">"
        ))
    }

    /// A drawing with links, which an image can't have.
    fn begin_linked(class: &str, label: &str, width: f64, height: f64) -> Self {
        let Self(text) = Self::begin(class, label, width, height);
        Self(text.replace("role=\"img\"", "role=\"group\""))
    }

    fn add(&mut self, part: fmt::Arguments<'_>) {
        // Writing to a String can't fail.
        let _ = self.0.write_fmt(part);
    }

    fn bar(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64) {
        if height > 0.0 {
            self.add(format_args!(
                "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\"/>"
            ));
        }
    }

    /// A horizontal grid line at this share of the height.
    fn rule(&mut self, share: f64, width: usize) {
        let y = HEIGHT * (1.0 - share);
        self.add(format_args!(
            "<line class=\"rule\" x1=\"0\" x2=\"{width}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
        ));
    }

    /// Begins a link to the deliveries that were attempted in a step. Not a stop of the Tab key: a chart has dozens, and the
    /// filter by time does the same.
    fn begin_link(&mut self, series: &Series, index: usize, filters: &str) {
        let (since, until) = (series.at(index), series.at(index) + series.step);
        self.add(format_args!(
            "<a href=\"/deliveries?{filters}attempted_since={}&amp;attempted_until={}\" tabindex=\"-1\" aria-label=\"Deliveries attempted from {}\">",
            address_time(since),
            address_time(until),
            utc(since)
        ));
    }

    fn end(mut self) -> Svg {
        self.0.push_str("</svg>");
        Svg(self.0)
    }
}

/// A time in an address.
pub(crate) fn address_time(at: DateTime<Utc>) -> String {
    at.format("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn utc(at: DateTime<Utc>) -> String {
    at.format("%d %b %H:%M UTC").to_string()
}

/// The upper bound of an axis: 1, 2 or 5 times a power of ten.
fn upper_bound(highest: f64) -> f64 {
    let mut top = 1.0;
    loop {
        for factor in [1.0, 2.0, 5.0] {
            if top * factor >= highest {
                return top * factor;
            }
        }
        top *= 10.0;
    }
}

/// Outcomes of attempts as stacked bars, each a link to its deliveries.
pub(crate) fn outcomes(series: &Series) -> Chart {
    let highest = series
        .steps
        .iter()
        .map(Totals::attempts)
        .max()
        .unwrap_or_default();
    let top = upper_bound(highest as f64);
    let total = series.total();
    let label = format!(
        "{} delivered, {} retried, {} dead",
        grouped(total.delivered),
        grouped(total.retried),
        grouped(total.dead)
    );
    let mut drawing = Drawing::begin_linked("chart", &label, series.steps.len() as f64, HEIGHT);
    drawing.rule(0.5, series.steps.len());
    for (index, step) in series.steps.iter().enumerate() {
        drawing.begin_link(series, index, "");
        let x = index as f64 + (1.0 - BAR_SHARE) / 2.0;
        drawing.add(format_args!(
            "<g><title>{}: {} delivered, {} retried, {} dead</title>",
            utc(series.at(index)),
            grouped(step.delivered),
            grouped(step.retried),
            grouped(step.dead)
        ));
        drawing.add(format_args!(
            "<rect class=\"hit\" x=\"{index}\" y=\"0\" width=\"1\" height=\"{HEIGHT}\"/>"
        ));
        let mut y = HEIGHT;
        for (class, count) in [
            ("good", step.delivered),
            ("wait", step.retried),
            ("bad", step.dead),
        ] {
            // A single attempt among many stays visible.
            let height = match count {
                0 => 0.0,
                count => (count as f64 / top * HEIGHT).max(0.8),
            };
            y -= height;
            drawing.bar(class, x, y, BAR_SHARE, height);
        }
        drawing.add(format_args!("</g></a>"));
    }
    Chart {
        svg: drawing.end(),
        top: grouped(top as i64),
    }
}

/// p50, p95 and p99 of attempt durations.
pub(crate) fn latency(series: &Series) -> Chart {
    const LINES: [(&str, f64); 3] = [("p50", 0.50), ("p95", 0.95), ("p99", 0.99)];
    let highest = series
        .steps
        .iter()
        .filter_map(|step| step.percentile_ms(0.99))
        .fold(0.0, f64::max);
    let top = upper_bound(highest);
    let total = series.total();
    let label = LINES.map(|(name, share)| match total.percentile_ms(share) {
        Some(ms) => format!("{name} {}", format_ms(ms)),
        None => format!("{name} no data"),
    });
    let mut drawing = Drawing::begin("chart", &label.join(", "), series.steps.len() as f64, HEIGHT);
    drawing.rule(0.5, series.steps.len());
    for (class, share) in LINES {
        let values: Vec<Option<f64>> = series
            .steps
            .iter()
            .map(|step| step.percentile_ms(share))
            .collect();
        drawing.add(format_args!(
            "<path class=\"{class}\" d=\"{}\"/>",
            line(&values, top)
        ));
    }
    for (index, step) in series.steps.iter().enumerate() {
        if let (Some(p50), Some(p95), Some(p99)) = (
            step.percentile_ms(0.5),
            step.percentile_ms(0.95),
            step.percentile_ms(0.99),
        ) {
            drawing.add(format_args!(
                "<rect class=\"hit\" x=\"{index}\" y=\"0\" width=\"1\" height=\"{HEIGHT}\"><title>{}: p50 {}, p95 {}, p99 {}</title></rect>",
                utc(series.at(index)),
                format_ms(p50),
                format_ms(p95),
                format_ms(p99)
            ));
        }
    }
    Chart {
        svg: drawing.end(),
        top: format_ms(top),
    }
}

/// An SVG path through the values. A value without neighbours becomes a short dash, because a point would be invisible.
fn line(values: &[Option<f64>], top: f64) -> String {
    let mut path = String::new();
    let at = |index: usize| values.get(index).copied().flatten();
    for (index, value) in values.iter().enumerate() {
        let Some(value) = value else { continue };
        let (x, y) = (index as f64 + 0.5, HEIGHT * (1.0 - value / top));
        let follows = index.checked_sub(1).and_then(at).is_some();
        let _ = match (follows, at(index + 1).is_some()) {
            (true, _) => write!(path, "L{x:.1} {y:.1}"),
            (false, true) => write!(path, "M{x:.1} {y:.1}"),
            (false, false) => write!(path, "M{:.1} {y:.1}h0.8", x - 0.4),
        };
    }
    path
}

/// The colour of a step: healthy, some failures, mostly failing, or no traffic.
fn tone(step: &Totals) -> &'static str {
    match step.success_percent() {
        None => "none",
        Some(percent) if percent >= 99.5 => "good",
        Some(percent) if percent >= 50.0 => "wait",
        Some(_) => "bad",
    }
}

fn health_label(series: &Series) -> String {
    match series.total().success_percent() {
        None => "No attempts in this period".to_owned(),
        Some(percent) => format!("{} of attempts succeeded", format_percent(percent)),
    }
}

/// The health of an endpoint in each step. Each is a link to the list of deliveries with these filters, which end with `&amp;`.
pub(crate) fn health(series: &Series, filters: &str) -> Svg {
    let mut drawing = Drawing::begin_linked("bar", &health_label(series), series.steps.len() as f64, 1.0);
    for (index, step) in series.steps.iter().enumerate() {
        let label = match step.success_percent() {
            None => "no attempts".to_owned(),
            Some(percent) => format!(
                "{} of {} succeeded",
                format_percent(percent),
                counted(step.attempts(), "attempt", "attempts")
            ),
        };
        drawing.begin_link(series, index, filters);
        drawing.add(format_args!(
            "<rect class=\"{}\" x=\"{index}\" y=\"0\" width=\"{BAR_SHARE}\" height=\"1\"><title>{}: {label}</title></rect></a>",
            tone(step),
            utc(series.at(index))
        ));
    }
    drawing.end()
}

/// The same for a list of many endpoints: small, without links and numbers.
pub(crate) fn small_health(series: &Series) -> Svg {
    let mut drawing = Drawing::begin("bar", &health_label(series), series.steps.len() as f64, 1.0);
    for class in ["good", "wait", "bad", "none"] {
        let mut path = String::new();
        for (index, _) in series
            .steps
            .iter()
            .enumerate()
            .filter(|(_, step)| tone(step) == class)
        {
            let _ = write!(path, "M{index} 0h{BAR_SHARE}v1h-{BAR_SHARE}z");
        }
        if !path.is_empty() {
            drawing.add(format_args!("<path class=\"{class}\" d=\"{path}\"/>"));
        }
    }
    drawing.end()
}

/// The distribution of attempt durations, without the empty buckets at both ends.
pub(crate) struct Histogram {
    pub(crate) svg: Svg,
    pub(crate) from: String,
    pub(crate) upto: String,
}

pub(crate) fn histogram(totals: &Totals) -> Option<Histogram> {
    let first = totals.durations.iter().position(|count| *count > 0)?;
    let last = totals.durations.iter().rposition(|count| *count > 0)?;
    let highest = totals.durations.iter().copied().max().unwrap_or(1) as f64;
    let low = |index: usize| match index {
        0 => "0 ms".to_owned(),
        index => format_ms(f64::from(BOUNDS_MS[index - 1])),
    };
    let high = |index: usize| match BOUNDS_MS.get(index) {
        Some(bound) => format_ms(f64::from(*bound)),
        None => "∞".to_owned(),
    };
    let label = format!("Durations from {} to {}", low(first), high(last));
    let shown = &totals.durations[first..=last];
    let mut drawing = Drawing::begin("chart", &label, shown.len() as f64, HEIGHT);
    for (place, count) in shown.iter().enumerate() {
        let height = if *count == 0 {
            0.0
        } else {
            (*count as f64 / highest * HEIGHT).max(1.0)
        };
        drawing.add(format_args!(
            "<g><title>{} to {}: {}</title><rect class=\"hit\" x=\"{place}\" y=\"0\" width=\"1\" height=\"{HEIGHT}\"/>",
            low(first + place),
            high(first + place),
            counted(count, "attempt", "attempts")
        ));
        let x = place as f64 + (1.0 - BAR_SHARE) / 2.0;
        drawing.bar("accent", x, HEIGHT - height, BAR_SHARE, height);
        drawing.add(format_args!("</g>"));
    }
    Some(Histogram {
        svg: drawing.end(),
        from: low(first),
        upto: high(last),
    })
}

/// A part of a whole as a horizontal bar.
pub(crate) fn share(class: &str, part: f64, whole: f64, label: &str) -> Svg {
    let mut drawing = Drawing::begin("bar thin", label, 100.0, 1.0);
    drawing.bar("none", 0.0, 0.0, 100.0, 1.0);
    let width = if whole > 0.0 {
        (part / whole * 100.0).clamp(0.0, 100.0)
    } else {
        0.0
    };
    drawing.bar(class, 0.0, 0.0, width, if width > 0.0 { 1.0 } else { 0.0 });
    drawing.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeDelta;

    #[test]
    fn an_upper_bound_is_round_and_not_below_the_highest_value() {
        for (highest, top) in [(0.0, 1.0), (1.0, 1.0), (3.0, 5.0), (501.0, 1_000.0), (20.0, 20.0)] {
            assert!((upper_bound(highest) - top).abs() < f64::EPSILON, "{highest}");
        }
    }

    #[test]
    fn a_value_without_neighbours_is_a_dash() {
        let values = [None, Some(50.0), None, Some(0.0), Some(100.0)];
        assert_eq!(line(&values, 100.0), "M1.1 50.0h0.8M3.5 100.0L4.5 0.0");
        assert_eq!(line(&[], 1.0), "");
    }

    #[test]
    fn a_period_without_attempts_is_drawn_without_invalid_numbers() {
        let now = DateTime::from_timestamp(600, 0).expect("a time");
        let series = Series::until(now, TimeDelta::minutes(1), 5);
        for svg in [
            outcomes(&series).svg,
            latency(&series).svg,
            health(&series, ""),
            small_health(&series),
        ] {
            let text = svg.to_string();
            assert!(text.starts_with("<svg") && text.ends_with("</svg>"));
            assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        }
        assert!(histogram(&series.total()).is_none());
        assert!(!share("good", 1.0, 0.0, "x").to_string().contains("NaN"));
    }
}
