//! Where a tenant lives. Emits and reads may use what was read a moment ago: a cell refuses the events of a tenant that has left
//! it. Everything else asks home each time.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::{Here, app_of, ask_within, everywhere::OWNER_TIME_MAX, not_responding};
use crate::{
    Shared,
    http::problem::{Kind, Problem},
    tables::cells::{self, Location, Possession},
};

/// A tenant that starts to move waits longer before anything is copied.
const KEPT: Duration = Duration::from_secs(1);
const TENANTS_MAX: usize = 10_000;

/// Tenants that were looked up a moment ago.
#[derive(Default)]
pub(crate) struct Directory(Mutex<HashMap<String, (Location, Instant)>>);

impl Directory {
    fn recent(&self, slug: &str) -> Option<Location> {
        let kept = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let (location, at) = kept.get(slug)?;
        (at.elapsed() < KEPT).then_some(*location)
    }

    fn keep(&self, slug: &str, location: Location) {
        let mut kept = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if kept.len() >= TENANTS_MAX {
            kept.clear();
        }
        kept.insert(slug.to_owned(), (location, Instant::now()));
    }

    pub(super) fn forget(&self, slug: &str) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).remove(slug);
    }
}

/// What a request about a tenant is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Read,
    Change,
    Emit,
}

impl Here {
    pub(super) fn anywhere(app: &Shared) -> Self {
        Self {
            app: app.clone(),
            home: app.clone(),
            waits: false,
        }
    }

    /// Home stores events in its outbox.
    fn waiting(app: &Shared) -> Self {
        Self {
            waits: true,
            ..Self::anywhere(app)
        }
    }

    fn at(app: &Shared, location: Location) -> Result<Self, Problem> {
        Ok(Self {
            app: app_of(app, location.cell_id)?,
            ..Self::anywhere(app)
        })
    }

    /// Of a tenant that may not exist: the handler says so.
    pub(crate) async fn of_tenant(app: &Shared, slug: &str, purpose: Purpose) -> Result<Self, Problem> {
        let Some(others) = app.cells.others() else {
            return Ok(Self::anywhere(app));
        };
        let recent = Some(&others.directory).filter(|_| purpose != Purpose::Change);
        let location = match recent.and_then(|directory| directory.recent(slug)) {
            Some(location) => location,
            None => match cells::location(&app.lookups, slug).await? {
                Some(location) => {
                    others.directory.keep(slug, location);
                    location
                }
                None => return Ok(Self::anywhere(app)),
            },
        };
        match purpose {
            Purpose::Read => Self::at(app, location),
            Purpose::Change if location.moving => Err(moving()),
            Purpose::Change => Self::at(app, location),
            Purpose::Emit if location.moving => Ok(Self::waiting(app)),
            Purpose::Emit => Ok(Self::at(app, location).unwrap_or_else(|_| Self::waiting(app))),
        }
    }

    /// Of something that one of the tenants has.
    pub(crate) async fn of(app: &Shared, what: &Possession, purpose: Purpose) -> Result<Self, Problem> {
        if app.cells.others().is_none() {
            return Ok(Self::anywhere(app));
        }
        let asked = what.clone();
        let answers = ask_within(app, OWNER_TIME_MAX, move |app: Shared| {
            let what = asked.clone();
            async move { Ok(cells::owner(&app.pool, &what).await?) }
        })
        .await?;
        let Some(tenant) = answers.found.into_iter().find_map(|(_, tenant)| tenant) else {
            return match answers.silent.is_empty() {
                true => Ok(Self::anywhere(app)),
                false => Err(not_responding(&answers.silent)),
            };
        };
        match cells::location_of(&app.lookups, tenant).await? {
            Some(location) if location.moving && purpose == Purpose::Change => Err(moving()),
            Some(location) => Self::at(app, location),
            None => Ok(Self::anywhere(app)),
        }
    }

    /// Whether the request runs in another database than home's.
    pub(crate) fn is_away(&self) -> bool {
        self.app.cell.as_deref().is_some_and(|name| name != "home")
    }

    /// The tenant is not where it was a moment ago.
    pub(crate) fn forget(&self, slug: &str) {
        self.home.cells.forget(slug);
    }

    /// The app that stores events of this tenant with these ordering keys. An event must not overtake an earlier one of its key
    /// that waits at home.
    pub(crate) async fn emitting(&self, tenant: &str, keys: &[&str]) -> Result<&Shared, Problem> {
        let overtakes = self.is_away()
            && !keys.is_empty()
            && cells::is_key_waiting(&self.home.lookups, tenant, keys).await?;
        Ok(if overtakes { &self.home } else { &self.app })
    }

    /// Whether the tenant lives in another cell than home, or is moving.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.is_away() || self.waits
    }
}

fn moving() -> Problem {
    Problem::new(
        Kind::Busy,
        "The tenant is being moved to another cell. Nothing can be changed meanwhile. Try again shortly.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_of_tenants_has_a_bound() {
        let (directory, location) = (
            Directory::default(),
            Location {
                cell_id: 1,
                moving: false,
            },
        );
        for n in 0..2 * TENANTS_MAX {
            directory.keep(&n.to_string(), location);
        }
        assert!(directory.0.lock().expect("no panic").len() <= TENANTS_MAX);
        assert_eq!(
            directory.recent(&(2 * TENANTS_MAX - 1).to_string()),
            Some(location)
        );
        directory.forget(&(2 * TENANTS_MAX - 1).to_string());
        assert_eq!(directory.recent(&(2 * TENANTS_MAX - 1).to_string()), None);
    }
}
