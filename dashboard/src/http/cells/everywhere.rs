//! Questions to all cells at once, and lists made of their answers.

use std::{
    collections::{BTreeMap, VecDeque},
    future::Future,
    time::Duration,
};

use chrono::{DateTime, Utc};
use tokio::{task::JoinSet, time::timeout};

use crate::{
    Shared,
    http::{
        pagination::Position,
        problem::{Problem, excerpt},
    },
    tables::cells::HOME,
};

/// A page is complete after this, with or without the cells that have not answered.
const ASK_TIME_MAX: Duration = Duration::from_secs(3);
/// To find whose something is.
pub(super) const OWNER_TIME_MAX: Duration = Duration::from_secs(2);

/// By cell, home first; and the names of cells that did not answer in time.
#[derive(Debug)]
pub(crate) struct Answers<T> {
    pub(crate) found: Vec<(i16, T)>,
    pub(crate) silent: Vec<String>,
}

/// Asks home and all other cells at once. Without others, the answer or the error is home's.
pub(crate) async fn ask<T, F>(app: &Shared, question: impl Fn(Shared) -> F) -> Result<Answers<T>, Problem>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Problem>> + Send + 'static,
{
    ask_within(app, ASK_TIME_MAX, question).await
}

/// The same for a list that goes on at another position in each cell.
pub(crate) async fn ask_from<T, F>(
    app: &Shared,
    before: &Positions,
    question: impl Fn(Shared, Option<i64>) -> F,
) -> Result<Answers<T>, Problem>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Problem>> + Send + 'static,
{
    ask_each(app, ASK_TIME_MAX, |cell, app| question(app, before.of(cell))).await
}

pub(crate) async fn ask_within<T, F>(
    app: &Shared,
    time: Duration,
    question: impl Fn(Shared) -> F,
) -> Result<Answers<T>, Problem>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Problem>> + Send + 'static,
{
    ask_each(app, time, |_, app| question(app)).await
}

async fn ask_each<T, F>(
    app: &Shared,
    time: Duration,
    question: impl Fn(i16, Shared) -> F,
) -> Result<Answers<T>, Problem>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Problem>> + Send + 'static,
{
    let others = app.cells.list();
    if others.is_empty() {
        return Ok(Answers {
            found: vec![(HOME, question(HOME, app.clone()).await?)],
            silent: Vec::new(),
        });
    }
    let mut silent = BTreeMap::from([(HOME, "home".to_owned())]);
    silent.extend(others.iter().map(|cell| (cell.row.id, cell.row.name.clone())));
    let mut asked = JoinSet::new();
    let open = others
        .iter()
        .filter_map(|cell| Some((cell.row.id, cell.app()?.clone())));
    for (id, app) in std::iter::once((HOME, app.clone())).chain(open) {
        let answer = question(id, app);
        asked.spawn(async move { (id, timeout(time, answer).await) });
    }
    let mut found = BTreeMap::new();
    while let Some(ended) = asked.join_next().await {
        match ended {
            Ok((id, Ok(Ok(answer)))) => {
                silent.remove(&id);
                found.insert(id, answer);
            }
            // The request is wrong, whichever cell says so.
            Ok((_, Ok(Err(problem)))) if problem.status().is_client_error() => return Err(problem),
            Ok((_, Ok(Err(_)) | Err(_))) => {}
            Err(panic) => return Err(Problem::internal("a question to a cell failed", panic)),
        }
    }
    Ok(Answers {
        found: found.into_iter().collect(),
        silent: silent.into_values().collect(),
    })
}

impl<T> Answers<T> {
    /// Without the cells they are from.
    pub(crate) fn parts(self) -> Vec<T> {
        self.found.into_iter().map(|(_, part)| part).collect()
    }
}

/// The part of a list that one cell has, of rows of which one more than `limit` was read.
pub(crate) fn part<T, K>(mut rows: Vec<T>, limit: i64, key: impl Fn(&T) -> K) -> (Vec<T>, Option<K>) {
    let is_cut = rows.len() as i64 > limit;
    rows.truncate(limit as usize);
    let end = rows.last().filter(|_| is_cut).map(key);
    (rows, end)
}

/// One list of several that are sorted by descending keys. Each part may end early, at its second value; nothing below the
/// highest of those is taken, because that part may have something in between. Returns where to continue.
pub(crate) fn merge<T, K: Ord + Copy>(
    parts: Vec<(Vec<T>, Option<K>)>,
    limit: i64,
    key: impl Fn(&T) -> K,
) -> (Vec<T>, Option<K>) {
    let mut parts = parts;
    if parts.len() == 1
        && let Some(only) = parts.pop()
    {
        return only;
    }
    let ends = parts.iter().filter_map(|(_, end)| *end).max();
    let mut rows: Vec<T> = parts.into_iter().flat_map(|(rows, _)| rows).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(key(row)));
    // Something that is being moved may be in two cells.
    rows.dedup_by_key(|row| key(row));
    if let Some(end) = ends {
        rows.retain(|row| key(row) >= end);
    }
    let is_cut = rows.len() as i64 > limit;
    rows.truncate(limit as usize);
    let next = match is_cut {
        true => rows.last().map(&key),
        false => ends,
    };
    (rows, next)
}

/// How far a list was read in each cell whose ids are no order of time. Written as a plain number where there is one cell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Positions(BTreeMap<i16, i64>);

impl Positions {
    pub(crate) fn of(&self, cell: i16) -> Option<i64> {
        self.0.get(&cell).copied()
    }
}

impl Position for Positions {
    fn write(&self) -> String {
        if let (1, Some(at)) = (self.0.len(), self.of(HOME)) {
            return at.to_string();
        }
        let parts: Vec<String> = self.0.iter().map(|(cell, at)| format!("{cell}.{at}")).collect();
        parts.join("_")
    }

    fn read(text: &str) -> Option<Self> {
        if let Ok(at) = text.parse() {
            return Some(Self(BTreeMap::from([(HOME, at)])));
        }
        let part = |part: &str| {
            let (cell, at) = part.split_once('.')?;
            Some((cell.parse().ok()?, at.parse().ok()?))
        };
        text.split('_').map(part).collect::<Option<_>>().map(Self)
    }
}

/// One list, newest first, of several that each have up to `limit` + 1 rows in order of their ids. Returns where to continue in
/// each cell.
pub(crate) fn interleave<T>(
    parts: Vec<(i16, Vec<T>)>,
    before: &Positions,
    limit: i64,
    time: impl Fn(&T) -> DateTime<Utc>,
    id: impl Fn(&T) -> i64,
) -> (Vec<T>, Option<Positions>) {
    let mut parts: Vec<(i16, VecDeque<T>)> = parts
        .into_iter()
        .map(|(cell, rows)| (cell, rows.into()))
        .collect();
    let (mut rows, mut next) = (Vec::new(), before.clone());
    loop {
        // Each part keeps its order, whatever its clock says.
        let newest = parts
            .iter_mut()
            .filter(|(_, rows)| !rows.is_empty())
            .max_by_key(|(_, rows)| rows.front().map(&time));
        let Some((cell, part)) = newest else {
            return (rows, None);
        };
        if rows.len() as i64 == limit {
            return (rows, Some(next));
        }
        if let Some(row) = part.pop_front() {
            next.0.insert(*cell, id(&row));
            rows.push(row);
        }
    }
}

/// For a page: which cells it lacks.
pub(crate) fn silent_text(silent: &[String]) -> Option<String> {
    let names: Vec<String> = silent.iter().map(|name| excerpt(name)).collect();
    (!names.is_empty()).then(|| {
        format!(
            "No response from: {}. Their data is missing here.",
            names.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_end_early_hold_back_what_is_below_them() {
        let whole = |rows: &[i32]| (rows.to_vec(), None);
        assert_eq!(
            merge(vec![whole(&[9, 4]), whole(&[7])], 5, |n| *n),
            (vec![9, 7, 4], None)
        );
        // The second part was read down to 6 only.
        let parts = vec![whole(&[9, 4]), (vec![7], Some(6))];
        assert_eq!(merge(parts, 5, |n| *n), (vec![9, 7], Some(6)));
        let parts = vec![(vec![9, 8], Some(8)), (vec![7, 6], Some(6))];
        assert_eq!(merge(parts, 2, |n| *n), (vec![9, 8], Some(8)));
        // The same one in two cells.
        assert_eq!(merge(vec![whole(&[3]), whole(&[3])], 5, |n| *n), (vec![3], None));
    }

    #[test]
    fn every_row_is_on_one_page_however_clocks_differ() {
        let at = |seconds: i64| DateTime::from_timestamp(seconds, 0).expect("a time");
        // (time, id): each cell's ids descend, their times nearly.
        let home = [(90, 5), (95, 4), (30, 3), (10, 1)];
        let away = [(100, 105), (40, 103), (35, 102)];
        let mut before = Positions::default();
        let mut seen = Vec::new();
        for _ in 0..10 {
            let part = |cell: i16, rows: &[(i64, i64)]| {
                let from = before.of(cell).unwrap_or(i64::MAX);
                let left = rows.iter().filter(|(_, id)| *id < from).take(3);
                (cell, left.copied().collect::<Vec<_>>())
            };
            let parts = vec![part(0, &home), part(2, &away)];
            let (rows, next) = interleave(parts, &before, 2, |row| at(row.0), |row| row.1);
            seen.extend(rows.iter().map(|row| row.1));
            let Some(next) = next else { break };
            before = Positions::read(&next.write()).expect("a position");
        }
        seen.sort_unstable();
        assert_eq!(seen, [1, 3, 4, 5, 102, 103, 105]);
    }

    #[test]
    fn a_position_in_one_cell_is_a_number() {
        let one = Positions::read("17").expect("a number");
        assert_eq!((one.of(HOME), one.write().as_str()), (Some(17), "17"));
        for bad in ["", "x", "1.", "1.2_", "1.2_x.3"] {
            assert_eq!(Positions::read(bad), None, "{bad}");
        }
    }
}
