//! Live lists of deliveries. The rows that a reader sees stay where they are: their states are updated, and deliveries
//! that came since are counted and offered, not inserted.
//! Invariant: an update reads at most `SHOWN_MAX` rows and one page of the list.

use askama::Template;
use postrider_proto::{DeliveryId, TenantId};
use serde::Deserialize;

use super::{DeliverySummary, Markup};
use crate::{
    Pool,
    http::problem::Problem,
    tables::deliveries::{self, Delivery, Filter, time_of},
};

/// Rows of one list.
pub(super) const SHOWN_MAX: usize = 40;
/// New deliveries that are counted exactly.
const NEW_MAX: usize = 99;

/// What a page shows, as its stream is told.
#[derive(Default, Clone, Deserialize)]
#[serde(default)]
pub(crate) struct ShownRowsQuery {
    shown: String,
    floor: Option<String>,
}

/// The deliveries on a page.
#[derive(Debug, Clone, Default)]
pub(super) struct ShownRows {
    ids: Vec<DeliveryId>,
    /// Older deliveries are on the next page.
    floor: Option<DeliveryId>,
}

impl ShownRows {
    pub(super) fn of(found: &[Delivery], floor: Option<DeliveryId>) -> Self {
        Self {
            ids: found.iter().map(Delivery::id).collect(),
            floor,
        }
    }

    pub(super) fn read(query: &ShownRowsQuery) -> Result<Self, Problem> {
        let id = |text: &str| -> Result<DeliveryId, Problem> {
            let invalid = |_| Problem::bad_request(format!("Invalid delivery ID {text:?}."));
            text.parse().map_err(invalid)
        };
        let ids = query.shown.split('.').filter(|text| !text.is_empty());
        let ids: Vec<DeliveryId> = ids.take(SHOWN_MAX + 1).map(id).collect::<Result<_, _>>()?;
        if ids.len() > SHOWN_MAX {
            return Err(Problem::bad_request(format!(
                "A list shows at most {SHOWN_MAX} deliveries."
            )));
        }
        let floor = query.floor.as_deref().map(id).transpose()?;
        Ok(Self { ids, floor })
    }

    /// For the address of the stream.
    pub(super) fn pairs(&self) -> Vec<(&'static str, String)> {
        let ids: Vec<String> = self.ids.iter().map(DeliveryId::to_string).collect();
        let floor = self.floor.map(|floor| ("floor", floor.to_string()));
        [("shown", ids.join("."))].into_iter().chain(floor).collect()
    }

    /// The shown deliveries as they are now, whether or not they still match the filters of the list.
    pub(super) async fn load(
        &self,
        pool: &Pool,
        tenant: Option<TenantId>,
    ) -> sqlx::Result<Vec<DeliverySummary>> {
        let found = deliveries::find_all(pool, tenant, &self.ids).await?;
        Ok(found.iter().map(DeliverySummary::from).collect())
    }

    /// In the order of the page, where they come from several cells.
    pub(super) fn in_order(&self, mut lines: Vec<DeliverySummary>) -> Vec<DeliverySummary> {
        let ids: Vec<String> = self.ids.iter().map(DeliveryId::to_string).collect();
        let place = |line: &DeliverySummary| ids.iter().position(|id| *id == line.id);
        lines.sort_by_key(place);
        lines.dedup_by(|a, b| a.id == b.id);
        lines
    }

    /// Counts deliveries that belong on the page and are not on it: at most `NEW_MAX` and one.
    pub(super) async fn count_new(&self, pool: &Pool, filter: &Filter) -> sqlx::Result<usize> {
        let since = self.floor.and_then(|floor| time_of(floor.event));
        let filter = Filter {
            since: filter.since.max(since),
            ..filter.clone()
        };
        let limit = self.ids.len() + NEW_MAX + 1;
        let (found, _) = deliveries::list(pool, &filter, None, limit as i64).await?;
        let is_new = |id: DeliveryId| self.floor.is_none_or(|floor| id > floor) && !self.ids.contains(&id);
        let count = found.iter().filter(|delivery| is_new(delivery.id())).count();
        Ok(count.min(NEW_MAX + 1))
    }
}

/// The bar above a list, a live part.
#[derive(Template)]
#[template(path = "deliveries_new.html")]
pub(super) struct NewBar<'a> {
    count: usize,
    /// Where the list begins with them.
    address: &'a str,
}

impl<'a> NewBar<'a> {
    pub(super) fn of(count: usize, address: &'a str) -> Result<Markup, Problem> {
        Markup::of(&Self { count, address })
    }

    fn label(&self) -> String {
        match self.count {
            1 => "1 new delivery".to_owned(),
            count if count > NEW_MAX => format!("{NEW_MAX}+ new deliveries"),
            count => format!("{count} new deliveries"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_proto::{EndpointId, EventId};

    fn shown(count: i32) -> ShownRows {
        let id = |number| DeliveryId {
            event: EventId::LOWEST,
            endpoint: EndpointId(number),
        };
        ShownRows {
            ids: (1..=count).map(id).collect(),
            floor: Some(id(0)),
        }
    }

    fn query(shown: &ShownRows) -> ShownRowsQuery {
        let mut query = ShownRowsQuery::default();
        for (name, value) in shown.pairs() {
            match name {
                "shown" => query.shown = value,
                _ => query.floor = Some(value),
            }
        }
        query
    }

    #[test]
    fn what_a_page_shows_is_read_back_and_bounded() {
        let most = shown(SHOWN_MAX as i32);
        let read = ShownRows::read(&query(&most)).unwrap_or_else(|_| panic!("as written"));
        assert_eq!((read.ids, read.floor), (most.ids, most.floor));
        assert!(ShownRows::read(&query(&shown(SHOWN_MAX as i32 + 1))).is_err());
        let broken = ShownRowsQuery {
            shown: "dlv_x".to_owned(),
            floor: None,
        };
        assert!(ShownRows::read(&broken).is_err());
        assert!(ShownRows::read(&ShownRowsQuery::default()).is_ok_and(|none| none.ids.is_empty()));
    }

    #[test]
    fn the_bar_counts_up_to_its_limit() {
        let label = |count| NewBar { count, address: "/" }.label();
        assert_eq!(label(1), "1 new delivery");
        assert_eq!(label(99), "99 new deliveries");
        assert_eq!(label(100), "99+ new deliveries");
    }
}
