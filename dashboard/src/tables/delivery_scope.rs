//! Which tables a list of deliveries reads, and how many rows at a time.

use std::cmp::Reverse;

use postrider_proto::{DeliveryState, EndpointId};

use super::deliveries::{DeliveryKey, Filter, Span};
use crate::{
    Pool,
    tables::{attempts, dead_letters, endpoints, queue, retries},
};

const SCAN_STEP_MAX: i64 = 1_000;
/// First step of a search in which few rows may match, and of one in which most do.
const SCAN_STEP_NARROW: i64 = 1_000;
const SCAN_STEP_REFUSED: i64 = 200;
const SCAN_STEP_REFUSED_MAX: i64 = 600;
/// Rows that a step reads from `queue`, and from `retries`, before it sorts them.
const WAITING_READ_MAX: i64 = 100_000;
/// Endpoints whose pending deliveries are read.
const ENDPOINTS_SCANNED_MAX: i64 = 20_000;

/// Which tables a list reads.
pub(super) enum Scope {
    /// Attempts of a bulk replay: they have an index.
    Replay(String),
    /// Attempts with this status code: an index covers the unsuccessful ones.
    Refused(i16),
    /// All tables that a delivery can be in. `queue` and `retries` can be read by endpoint only.
    All {
        waiting: Vec<EndpointId>,
        has_status: bool,
    },
}

impl Scope {
    pub(super) async fn of(pool: &Pool, filter: &Filter) -> sqlx::Result<Self> {
        if let Some(replay) = &filter.replay {
            return Ok(Self::Replay(replay.clone()));
        }
        match filter.status_code {
            Some(code) if !(200..=299).contains(&code) => Ok(Self::Refused(code)),
            code => Ok(Self::All {
                waiting: Self::waiting(pool, filter).await?,
                has_status: code.is_some(),
            }),
        }
    }

    /// Across all tenants only endpoints with pending deliveries are read: most of many thousands have none.
    async fn waiting(pool: &Pool, filter: &Filter) -> sqlx::Result<Vec<EndpointId>> {
        match (filter.state, filter.endpoint, filter.tenant) {
            (Some(DeliveryState::Delivered | DeliveryState::Dead | DeliveryState::Discarded), _, _) => {
                Ok(Vec::new())
            }
            (_, Some(endpoint), _) => Ok(vec![endpoint]),
            (_, None, Some(tenant)) => {
                endpoints::live_numbers(pool, Some(tenant), ENDPOINTS_SCANNED_MAX).await
            }
            (_, None, None) => {
                let mut waiting = queue::endpoints(pool, ENDPOINTS_SCANNED_MAX).await?;
                waiting.extend(retries::endpoints(pool, ENDPOINTS_SCANNED_MAX).await?);
                waiting.sort_unstable();
                waiting.dedup();
                Ok(waiting)
            }
        }
    }

    /// Step size, depending on whether the row itself decides the filter.
    pub(super) fn step_first(&self, is_narrow: bool) -> i64 {
        match self {
            Self::Refused(_) => SCAN_STEP_REFUSED,
            Self::All { has_status, .. } if *has_status || is_narrow => SCAN_STEP_NARROW.min(self.step_max()),
            Self::All { .. } | Self::Replay(_) => 0,
        }
    }

    pub(super) fn step_max(&self) -> i64 {
        match self {
            Self::Refused(_) => SCAN_STEP_REFUSED_MAX,
            Self::Replay(_) => SCAN_STEP_MAX,
            Self::All { waiting, .. } => SCAN_STEP_MAX.min(WAITING_READ_MAX / waiting.len().max(1) as i64),
        }
    }

    /// In the order in which a delivery moves, so that one that moves meanwhile is seen twice rather than missed.
    pub(super) async fn keys(
        &self,
        pool: &Pool,
        filter: &Filter,
        span: Span<'_>,
    ) -> sqlx::Result<Vec<DeliveryKey>> {
        let (waiting, has_status) = match self {
            Self::Replay(replay) => return attempts::list_of_replay(pool, replay, filter, span).await,
            Self::Refused(code) => return attempts::list_refused(pool, *code, filter, span).await,
            Self::All { waiting, has_status } => (waiting, *has_status),
        };
        let mut keys = Vec::new();
        if !waiting.is_empty() {
            keys.extend(queue::list(pool, waiting, span).await?);
            // A delivery waiting for a retry was not accepted.
            if !has_status {
                keys.extend(retries::list(pool, waiting, span).await?);
            }
        }
        // The last attempt of an ended delivery has failed only if it is dead. An earlier one may have failed in any case.
        let ended_state = match (filter.failure, filter.attempted) {
            (Some(_), None) => filter.state.or(Some(DeliveryState::Dead)),
            _ => filter.state,
        };
        let ended = match (ended_state, filter.endpoint, filter.tenant) {
            (Some(DeliveryState::Pending), _, _) => Vec::new(),
            (Some(DeliveryState::Dead), Some(endpoint), _) => {
                dead_letters::list_of_endpoint(pool, endpoint, span).await?
            }
            (Some(DeliveryState::Dead), None, Some(tenant)) => {
                dead_letters::list_of_tenant(pool, tenant, span).await?
            }
            (Some(DeliveryState::Dead), None, None) => dead_letters::list(pool, span).await?,
            (_, Some(endpoint), _) => attempts::list_ended_of_endpoint(pool, endpoint, span).await?,
            (_, None, Some(tenant)) => attempts::list_ended_of_tenant(pool, tenant, span).await?,
            (_, None, None) => attempts::list_ended(pool, span).await?,
        };
        keys.extend(ended);
        keys.sort_unstable_by_key(|key| Reverse(key.ids()));
        keys.dedup_by(|later, kept| {
            let same = later.ids() == kept.ids();
            kept.may_match |= same && later.may_match;
            same
        });
        keys.truncate(span.limit as usize);
        Ok(keys)
    }
}
