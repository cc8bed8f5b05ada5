//! The overview: current load and recent statistics. It reads the per-minute counters and the activity that dispatchers
//! report, and never counts attempts. Customers see the same page for their own tenant.

use std::{cmp::Reverse, time::Duration};

use askama::Template;
use askama_web::WebTemplate;
use axum::Extension;
use chrono::{DateTime, TimeDelta, Utc};
use postrider_dispatcher::statistics::ALL_ENDPOINTS;
use postrider_proto::{EndpointId, TenantId};
use serde::Deserialize;

use super::{Frame, Markup, Paged, When, checklist};
use crate::{
    Pool,
    auth::Visit,
    http::{
        cells::{ask, silent_text},
        input::Query,
        problem::Problem,
    },
    pages::{
        chart::{self, Chart, address_time},
        live::{Content, Live, Stream},
        stats_format::{
            Series, Totals, backlog, format_duration, format_ms, format_pending, format_percent, format_rate,
            grouped,
        },
    },
    tables::{
        activity::{self, DispatcherRow, SystemRow},
        endpoints,
        pending::{self, Pending},
        statistics::{self, WorstRow},
    },
};

const REFRESH: Duration = Duration::from_secs(2);
const WORST_MAX: i64 = 6;
const DISPATCHERS_MAX: i64 = 20;
const TENANT_ENDPOINTS_MAX: i64 = 500;

/// How far back the charts go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Range {
    #[default]
    Hour,
    Day,
    Week,
}

impl Range {
    const ALL: [Self; 3] = [Self::Hour, Self::Day, Self::Week];

    fn read(word: &str) -> Self {
        let found = Self::ALL.into_iter().find(|range| range.word() == word);
        found.unwrap_or_default()
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Hour => "1h",
            Self::Day => "24h",
            Self::Week => "7d",
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Hour => "1 hour",
            Self::Day => "24 hours",
            Self::Week => "7 days",
        }
    }

    /// The time that one bar of the chart covers.
    const fn bar_label(self) -> &'static str {
        match self {
            Self::Hour => "1 minute",
            Self::Day => "1 hour",
            Self::Week => "3 hours",
        }
    }

    /// Whether it is read from minutes. Longer periods are whole hours, which are fewer.
    const fn is_by_minutes(self) -> bool {
        matches!(self, Self::Hour)
    }

    fn series(self, now: DateTime<Utc>) -> Series {
        match self {
            Self::Hour => Series::until(now, TimeDelta::minutes(1), 60),
            Self::Day => Series::until(now, TimeDelta::hours(1), 24),
            Self::Week => Series::until(now, TimeDelta::hours(3), 56),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct OverviewQuery {
    range: String,
}

#[derive(Template, WebTemplate)]
#[template(path = "overview.html")]
pub(crate) struct OverviewPage {
    frame: Frame,
    range: Range,
    now: Markup,
}

impl OverviewPage {
    fn ranges(&self) -> [Range; 3] {
        Range::ALL
    }
}

/// The part that is updated live.
#[derive(Template)]
#[template(path = "overview_now.html")]
struct Now {
    /// What is left to set up.
    checklist: Markup,
    /// Which cells are missing.
    silent: Option<String>,
    is_team: bool,
    range: Range,
    /// When the period began, for addresses.
    since: String,
    per_second: String,
    last_minute: String,
    total: Totals,
    system: SystemRow,
    oldest: Option<String>,
    outcomes: Chart,
    latency: Chart,
    pending: Pending,
    worst: Vec<Failing>,
    dispatchers: Vec<DispatcherRow>,
}

impl Now {
    fn success(&self) -> String {
        self.total
            .success_percent()
            .map_or("–".to_owned(), format_percent)
    }

    fn percentile(&self, share: f64) -> String {
        self.total.percentile_ms(share).map_or("–".to_owned(), format_ms)
    }

    fn pending(&self) -> String {
        format_pending(self.pending)
    }

    fn backlog(&self) -> String {
        backlog(self.oldest.as_deref(), self.pending)
    }

    fn shards(&self) -> i64 {
        self.dispatchers.iter().map(|one| one.shards).sum()
    }
}

pub(crate) async fn show(visit: Visit, Query(query): Query<OverviewQuery>) -> Paged<OverviewPage> {
    let range = Range::read(&query.range);
    let now = render(&visit, range).await?;
    Ok(OverviewPage {
        frame: Frame::new(visit.session, "overview"),
        range,
        now,
    })
}

pub(crate) async fn follow(
    visit: Visit,
    Extension(live): Extension<Live>,
    Query(query): Query<OverviewQuery>,
) -> Result<Stream, Problem> {
    let range = Range::read(&query.range);
    let pool = visit.app.home.clone();
    live.stream(&pool, visit.session.clone(), REFRESH, move || {
        let visit = visit.clone();
        async move { Ok(Content::Html(render(&visit, range).await?.0)) }
    })
}

async fn render(visit: &Visit, range: Range) -> Result<Markup, Problem> {
    let scope = visit.session.scope();
    let answers = ask(&visit.app, move |app| async move {
        load(&app.pool, scope, range).await
    })
    .await?;
    let silent = silent_text(&answers.silent);
    let loaded = answers.parts().into_iter().reduce(Loaded::and);
    let now = loaded
        .ok_or_else(Problem::busy)?
        .shown(scope.is_none(), range, silent);
    let checklist = checklist::load(&visit.app, &visit.session).await?;
    Markup::of(&Now { checklist, ..now })
}

/// A failing endpoint with all its attempts in the period, successful ones included.
struct Failing {
    row: WorstRow,
    failed: i64,
    attempts: i64,
}

impl Failing {
    fn rate(&self) -> String {
        format_percent(100.0 * self.failed as f64 / self.attempts.max(1) as f64)
    }
}

/// From the counters that the page's totals are made of, so that both agree.
async fn failing(
    pool: &Pool,
    scope: Option<TenantId>,
    range: Range,
    since: DateTime<Utc>,
) -> Result<Vec<Failing>, Problem> {
    let worst = statistics::worst(pool, scope, since, WORST_MAX).await?;
    let ids: Vec<EndpointId> = worst.iter().map(|row| row.id).collect();
    let counts = match range.is_by_minutes() {
        true => statistics::sums_of_minutes(pool, &ids, since).await?,
        false => statistics::plain_hours(pool, &ids, since).await?,
    };
    let with_counts = |row: WorstRow| {
        let (mut failed, mut delivered) = (0, 0);
        for count in counts.iter().filter(|count| count.endpoint_id == row.id) {
            failed += count.retried + count.dead;
            delivered += count.delivered;
        }
        Failing {
            row,
            failed,
            attempts: failed + delivered,
        }
    };
    let mut failing: Vec<Failing> = worst.into_iter().map(with_counts).collect();
    failing.retain(|one| one.failed > 0);
    failing.sort_by_key(|one| Reverse(one.failed));
    Ok(failing)
}

/// What one cell has.
struct Loaded {
    system: SystemRow,
    series: Series,
    last_minute: f64,
    pending: Pending,
    worst: Vec<Failing>,
    dispatchers: Vec<DispatcherRow>,
}

impl Loaded {
    fn and(mut self, other: Self) -> Self {
        self.system = self.system.and(other.system);
        self.series.include(&other.series);
        self.last_minute += other.last_minute;
        self.pending = self.pending.and(other.pending);
        self.worst.extend(other.worst);
        self.worst.sort_by_key(|one| Reverse(one.failed));
        self.worst.truncate(WORST_MAX as usize);
        self.dispatchers.extend(other.dispatchers);
        self.dispatchers.truncate(DISPATCHERS_MAX as usize);
        self
    }

    fn shown(self, is_team: bool, range: Range, silent: Option<String>) -> Now {
        let Self { system, series, .. } = self;
        Now {
            checklist: Markup::empty(),
            silent,
            is_team,
            range,
            since: address_time(series.begin),
            per_second: format_rate(self.last_minute / 60.0),
            last_minute: grouped(self.last_minute.round() as i64),
            total: series.total(),
            oldest: system.oldest_at.map(|at| format_duration(system.now - at)),
            outcomes: chart::outcomes(&series),
            latency: chart::latency(&series),
            pending: self.pending,
            worst: self.worst,
            dispatchers: self.dispatchers,
            system,
        }
    }
}

async fn load(pool: &Pool, scope: Option<TenantId>, range: Range) -> Result<Loaded, Problem> {
    let system = activity::system(pool, scope).await?;
    let counted: Vec<EndpointId> = match scope {
        None => vec![ALL_ENDPOINTS],
        some => endpoints::live_numbers(pool, some, TENANT_ENDPOINTS_MAX).await?,
    };
    let mut series = range.series(system.now);
    let rows = match range.is_by_minutes() {
        true => statistics::minutes(pool, &counted, series.begin).await?,
        false => statistics::hours(pool, &counted, series.begin).await?,
    };
    rows.iter().for_each(|row| series.add(row));
    let recent = match range {
        Range::Hour => rows,
        Range::Day | Range::Week => {
            statistics::minutes(pool, &counted, system.now - TimeDelta::minutes(2)).await?
        }
    };
    let mut minutes = Series::until(system.now, TimeDelta::minutes(1), 2);
    recent.iter().for_each(|row| minutes.add(row));
    let last_minute = last_sixty_seconds(&minutes, system.now);
    let dispatchers = match scope {
        None => activity::dispatchers(pool, DISPATCHERS_MAX).await?,
        Some(_) => Vec::new(),
    };
    Ok(Loaded {
        last_minute,
        pending: match scope {
            None => pending::of_system(pool).await?,
            Some(_) => pending::of_endpoints(pool, &counted).await?,
        },
        worst: failing(pool, scope, range, series.begin).await?,
        dispatchers,
        series,
        system,
    })
}

/// The current minute so far, plus the share of the previous minute that lies within the last sixty seconds.
fn last_sixty_seconds(minutes: &Series, now: DateTime<Utc>) -> f64 {
    let [before, current] = minutes.steps.as_slice() else {
        return 0.0;
    };
    let elapsed = (now.timestamp_millis().rem_euclid(60_000)) as f64 / 60_000.0;
    current.delivered as f64 + before.delivered as f64 * (1.0 - elapsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_sixty_seconds_include_part_of_the_previous_minute() {
        let now = DateTime::from_timestamp(615, 0).expect("a time");
        let mut minutes = Series::until(now, TimeDelta::minutes(1), 2);
        minutes.steps[0].delivered = 60;
        minutes.steps[1].delivered = 10;
        assert!((last_sixty_seconds(&minutes, now) - 55.0).abs() < 1e-9);
    }

    #[test]
    fn an_unknown_range_defaults_to_an_hour() {
        assert_eq!(Range::read("24h"), Range::Day);
        assert_eq!(Range::read("<script>"), Range::Hour);
    }
}
