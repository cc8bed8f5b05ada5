//! How many deliveries are pending: the rows of `queue` and `retries`, counted up to a limit.
//! Invariant: a count reads at most `COUNTED_MAX` rows of each table, and none of tables that are larger than
//! `SCANNED_BYTES_MAX`, dead rows included.

use postrider_dispatcher::bind::BindAll;
use postrider_proto::EndpointId;
use sqlx::{FromRow, PgExecutor};

const COUNTED_MAX: i64 = 5_000;
const SCANNED_BYTES_MAX: i64 = 128 * 1024 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pending {
    Exactly(i64),
    /// Postgres's own estimate.
    About(i64),
    AtLeast(i64),
}

impl Pending {
    /// Of two databases: as exact as the less exact one.
    pub(crate) fn and(self, other: Self) -> Self {
        use Pending::{About, AtLeast, Exactly};
        let count = self.count() + other.count();
        match (self, other) {
            (AtLeast(_), _) | (_, AtLeast(_)) => AtLeast(count),
            (About(_), _) | (_, About(_)) => About(count),
            (Exactly(_), Exactly(_)) => Exactly(count),
        }
    }

    const fn count(self) -> i64 {
        match self {
            Self::Exactly(count) | Self::About(count) | Self::AtLeast(count) => count,
        }
    }
}

#[derive(FromRow)]
struct SystemRow {
    counted: i64,
    is_exact: bool,
    estimated: i64,
}

/// Of all tenants.
pub(crate) async fn of_system(db: impl PgExecutor<'_>) -> sqlx::Result<Pending> {
    let row: SystemRow = sqlx::query_as(include_str!("sql/pending_of_system.sql"))
        .bind_all((SCANNED_BYTES_MAX, COUNTED_MAX))
        .fetch_one(db)
        .await?;
    Ok(match row.is_exact {
        true => Pending::Exactly(row.counted),
        false => Pending::About(row.estimated.max(row.counted)),
    })
}

pub(crate) async fn of_endpoints(db: impl PgExecutor<'_>, ids: &[EndpointId]) -> sqlx::Result<Pending> {
    let counted: i64 = sqlx::query_scalar(include_str!("sql/pending_of_endpoints.sql"))
        .bind_all((ids, COUNTED_MAX))
        .fetch_one(db)
        .await?;
    Ok(match counted < COUNTED_MAX {
        true => Pending::Exactly(counted),
        false => Pending::AtLeast(COUNTED_MAX),
    })
}
