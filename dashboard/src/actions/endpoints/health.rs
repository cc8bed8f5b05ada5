//! Whether endpoints work, as the API shows it: of one endpoint, of a page, or across tenants.

use std::collections::HashMap;

use chrono::TimeDelta;
use postrider_dispatcher::statistics::Class;
use postrider_proto::{
    EndpointId, EndpointState,
    api::{AttemptCounts, EndpointHealth, EndpointStatus},
    state::{CircuitState, HealthStatus},
};

use crate::{
    Pool,
    actions::delivery_filter::failure_word,
    http::problem::Problem,
    tables::{
        self,
        endpoint_health::{self, AttemptsRow, HealthFilter, HealthRow},
        statistics,
    },
};

/// The health of each of these endpoints. Listeners and deleted endpoints have none.
pub(crate) async fn of(
    pool: &Pool,
    endpoints: &[EndpointId],
) -> Result<HashMap<EndpointId, EndpointHealth>, Problem> {
    let rows = endpoint_health::of(pool, endpoints, &HealthFilter::default(), endpoints.len() as i64).await?;
    Ok(rows.iter().map(|row| (row.id, shown(row))).collect())
}

/// An endpoint in a list, with its number.
pub(crate) type Numbered = (EndpointId, EndpointStatus);

/// A page in order of creation, and where the next one continues.
pub(crate) async fn list(
    pool: &Pool,
    filter: &HealthFilter,
    after: EndpointId,
    limit: i64,
) -> Result<(Vec<Numbered>, Option<EndpointId>), Problem> {
    let (rows, next) = endpoint_health::list(pool, filter, after, limit).await?;
    let numbers: Vec<EndpointId> = rows.iter().map(|row| row.id).collect();
    let shown = with_attempts(pool, rows).await?;
    Ok((numbers.into_iter().zip(shown).collect(), next))
}

/// Those with the most failed attempts in the last hour, the most first. There is one page of them.
pub(crate) async fn top_failing(
    pool: &Pool,
    filter: &HealthFilter,
    limit: i64,
) -> Result<Vec<EndpointStatus>, Problem> {
    let since = tables::now(pool).await? - TimeDelta::hours(1);
    let worst = statistics::worst(pool, filter.tenant, since, limit).await?;
    let ids: Vec<EndpointId> = worst.iter().map(|row| row.id).collect();
    let rows = endpoint_health::of(pool, &ids, filter, limit).await?;
    let mut found = with_attempts(pool, rows).await?;
    found.sort_by_key(|one| std::cmp::Reverse(one.last_hour.failed));
    Ok(found)
}

async fn with_attempts(pool: &Pool, rows: Vec<HealthRow>) -> Result<Vec<EndpointStatus>, Problem> {
    let ids: Vec<EndpointId> = rows.iter().map(|row| row.id).collect();
    let since = tables::now(pool).await? - TimeDelta::hours(1);
    let attempts = endpoint_health::attempts_since(pool, &ids, since).await?;
    let mut attempts: HashMap<EndpointId, AttemptCounts> =
        attempts.iter().map(|row| (row.id, counts(row))).collect();
    let status = |row: HealthRow| EndpointStatus {
        health: shown(&row),
        last_hour: attempts.remove(&row.id).unwrap_or_default(),
        tenant: row.tenant,
        id: row.public_id,
        url: row.url,
        description: row.description,
        state: row.state,
    };
    Ok(rows.into_iter().map(status).collect())
}

fn shown(row: &HealthRow) -> EndpointHealth {
    EndpointHealth {
        status: match row.effective_state {
            EndpointState::Active if row.failing_since.is_some() => HealthStatus::Failing,
            EndpointState::Active => HealthStatus::Healthy,
            EndpointState::Paused => HealthStatus::Paused,
            EndpointState::Disabled | EndpointState::Deleted => HealthStatus::Disabled,
        },
        circuit: match row.circuit_open {
            true => CircuitState::Open,
            false => CircuitState::Closed,
        },
        failing_since: row.failing_since,
        disabled_after: row.disabled_after,
        in_flight: row.in_flight,
        oldest_waiting_at: row.oldest_at,
    }
}

fn counts(row: &AttemptsRow) -> AttemptCounts {
    let failures = Class::ALL.into_iter().zip(&row.classes);
    let failures = failures.filter(|(class, count)| *class != Class::Accepted && **count > 0);
    AttemptCounts {
        delivered: row.delivered,
        failed: row.failed,
        failures: failures
            .map(|(class, count)| (failure_word(class).to_owned(), *count))
            .collect(),
    }
}
