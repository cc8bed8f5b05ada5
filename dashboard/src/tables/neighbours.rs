//! The deliveries of an endpoint before and after one. They are of the same endpoint, and so of the same tenant.

use postrider_dispatcher::bind::BindAll;
use postrider_proto::{DeliveryId, EndpointId, EventId};
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, Clone, Copy, FromRow)]
struct NeighbourRow {
    older: Option<EventId>,
    newer: Option<EventId>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Neighbours {
    pub(crate) older: Option<DeliveryId>,
    pub(crate) newer: Option<DeliveryId>,
}

pub(crate) async fn of(db: impl PgExecutor<'_>, id: DeliveryId) -> sqlx::Result<Neighbours> {
    let row: NeighbourRow = sqlx::query_as(include_str!("sql/neighbours.sql"))
        .bind_all((id.endpoint, id.event))
        .fetch_one(db)
        .await?;
    let delivery = |endpoint: EndpointId| move |event: EventId| DeliveryId { event, endpoint };
    Ok(Neighbours {
        older: row.older.map(delivery(id.endpoint)),
        newer: row.newer.map(delivery(id.endpoint)),
    })
}
