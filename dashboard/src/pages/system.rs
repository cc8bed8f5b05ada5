//! The system page: dispatchers and their shards, partitions and table sizes.

use std::collections::BTreeMap;

use askama::Template;
use askama_web::WebTemplate;
use axum::response::Redirect;
use chrono::NaiveDate;
use postrider_dispatcher::sending::{self, SendingState};
use postrider_proto::api::SendingSettings;
use serde::Deserialize;

use super::{Frame, Moment, Paged, When as _};
use crate::{
    actions,
    auth::{Submitted, Visit},
    http::{cells::named, input::Query},
    tables::system::{self, DatabaseRow, DispatcherRow, ShardRow, TableRow},
};

const DONE: [(&str, &str); 2] = [
    ("stopped", "Sending stopped. Every dispatcher has confirmed it."),
    ("sending", "Sending resumed. Queued events are being sent."),
];

/// Older days are combined into one row.
const DAYS_SHOWN: usize = 31;

/// One day's partitions.
#[derive(Default, Clone)]
struct Day {
    name: String,
    events: i64,
    attempts: i64,
    bytes: i64,
}

#[derive(Template, WebTemplate)]
#[template(path = "system.html")]
pub(crate) struct SystemPage {
    frame: Frame,
    /// In an installation with several.
    cell: Option<String>,
    sending: SendingState,
    version: &'static str,
    database: DatabaseRow,
    dispatchers: Vec<DispatcherRow>,
    shards: Vec<ShardRow>,
    unowned: usize,
    days: Vec<Day>,
    older: Option<Day>,
    days_ahead: usize,
    tables: Vec<TableRow>,
}

impl SystemPage {
    fn started(&self, dispatcher: &DispatcherRow) -> Moment {
        Moment(Some(dispatcher.started_at))
    }

    fn expires(&self, dispatcher: &DispatcherRow) -> Moment {
        Moment(Some(dispatcher.expires_at))
    }

    fn ranges(&self, dispatcher: &DispatcherRow) -> String {
        ranges(&dispatcher.shards)
    }

    /// The version without the suffix that Linux distributions add.
    fn postgres(&self) -> &str {
        self.database.version.split(' ').next().unwrap_or_default()
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct StopForm {
    reason: String,
}

pub(crate) async fn stop_sending(visit: Visit, Submitted(form): Submitted<StopForm>) -> Paged<Redirect> {
    let settings = SendingSettings {
        stopped: true,
        reason: Some(form.reason),
        ..SendingSettings::default()
    };
    actions::sending::set(&visit.app, &visit.actor, &settings).await?;
    Ok(Redirect::to("/system?done=stopped#sending"))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct ResumeForm {
    /// `yes` from the page that says that this is a restored copy.
    confirm_restored: String,
}

pub(crate) async fn resume_sending(visit: Visit, Submitted(form): Submitted<ResumeForm>) -> Paged<Redirect> {
    let settings = SendingSettings {
        confirm_restored: form.confirm_restored == "yes",
        ..SendingSettings::default()
    };
    actions::sending::set(&visit.app, &visit.actor, &settings).await?;
    Ok(Redirect::to("/system?done=sending#sending"))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct SystemQuery {
    done: String,
    /// The name of a cell. Home, if there is none.
    cell: String,
}

pub(crate) async fn show(visit: Visit, Query(query): Query<SystemQuery>) -> Paged<SystemPage> {
    let visit = Visit {
        app: named(&visit.app, &query.cell)?,
        ..visit
    };
    let shards = system::shards(&visit.app.pool).await?;
    let today: NaiveDate = sqlx::query_scalar("select (clock_timestamp() at time zone 'utc')::date")
        .fetch_one(&visit.app.pool)
        .await?;
    let mut days = by_day(system::partitions(&visit.app.pool).await?);
    let is_ahead = |day: &Day| day.name > today.to_string();
    let days_ahead = days.iter().filter(|day| is_ahead(day)).count();
    days.retain(|day| !is_ahead(day));
    let older = days.split_off(days.len().min(DAYS_SHOWN));
    Ok(SystemPage {
        frame: Frame::new(visit.session, "system").with_done(&query.done, &DONE),
        cell: visit.app.cell.clone(),
        sending: sending::state(&visit.app.pool).await?,
        version: env!("CARGO_PKG_VERSION"),
        database: system::database(&visit.app.pool).await?,
        dispatchers: system::dispatchers(&visit.app.pool).await?,
        unowned: shards.iter().filter(|shard| shard.owner.is_none()).count(),
        shards,
        days,
        older: summed(&older),
        days_ahead,
        tables: system::tables(&visit.app.pool).await?,
    })
}

/// Groups partitions by day, newest first. They are named `events_20261116`.
fn by_day(partitions: Vec<TableRow>) -> Vec<Day> {
    let mut days: BTreeMap<NaiveDate, Day> = BTreeMap::new();
    for partition in partitions {
        let Some((table, day)) = partition.name.rsplit_once('_') else {
            continue;
        };
        let Ok(date) = NaiveDate::parse_from_str(day, "%Y%m%d") else {
            continue;
        };
        let day = days.entry(date).or_default();
        day.name = date.to_string();
        day.bytes += partition.bytes;
        match table {
            "events" => day.events = partition.rows,
            _ => day.attempts = partition.rows,
        }
    }
    days.into_values().rev().collect()
}

fn summed(days: &[Day]) -> Option<Day> {
    let oldest = days.last()?;
    Some(Day {
        name: format!("{} and older, since {}", days[0].name, oldest.name),
        events: days.iter().map(|day| day.events).sum(),
        attempts: days.iter().map(|day| day.attempts).sum(),
        bytes: days.iter().map(|day| day.bytes).sum(),
    })
}

/// `0–20, 33`.
fn ranges(shards: &[i16]) -> String {
    let mut spans: Vec<(i16, i16)> = Vec::new();
    for shard in shards {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == *shard => *last = *shard,
            _ => spans.push((*shard, *shard)),
        }
    }
    let ranges: Vec<String> = spans
        .into_iter()
        .map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}–{last}"),
        })
        .collect();
    ranges.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_formatted() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0–2, 5, 7–8");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn partitions_are_grouped_by_day() {
        let part = |name: &str, rows, bytes| TableRow {
            name: name.to_owned(),
            rows,
            bytes,
        };
        let days = by_day(vec![
            part("events_20261115", 1, 10),
            part("attempts_20261116", 3, 100),
            part("events_20261116", 2, 1_000),
            part("odd", 9, 9),
        ]);
        let found: Vec<_> = days
            .iter()
            .map(|d| (d.name.as_str(), d.events, d.attempts, d.bytes))
            .collect();
        assert_eq!(found, [("2026-11-16", 2, 3, 1_100), ("2026-11-15", 1, 0, 10)]);
        assert!(summed(&[]).is_none());
        assert_eq!(summed(&days).map(|day| day.bytes), Some(1_110));
    }
}
