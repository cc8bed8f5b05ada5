//! Searches for work that no tail will show: after a takeover in the shards taken over, and periodically in all
//! shards as a safety net. It reports each endpoint's first pending row and earliest retry; the engine reads on from
//! there.
//!
//! Finding the first row of an endpoint can be slow: while an old snapshot is open, a `pg_dump` for instance,
//! Postgres scans every dead row. The search therefore has a dedicated connection and proceeds page by page.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointId, Epoch, EventId, Shard};
use sqlx::{FromRow, PgConnection};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    backoff::Backoff,
    bind::BindAll,
    connector::Connector,
    db_timeout::{WithDbTimeout, within},
    dedicated_connection::DedicatedConnection,
    deliver::engine::EngineMessage,
    health::database::warn_unless_outage,
};

/// Endpoints of one page.
const PAGE_MAX: i64 = 1024;
/// A page that took longer makes the next one smaller.
const PAGE_TIME: Duration = Duration::from_millis(250);
/// Time limits of one statement: the first, which a connection that is cut off silently costs, and the longest. Each
/// statement that exceeds its limit doubles that of the next, which also reads a smaller page.
const STATEMENT_FIRST_MAX: Duration = Duration::from_secs(10);
const STATEMENT_MAX: Duration = Duration::from_secs(600);
/// While a search fails although the database responds.
const LOG_EVERY: Duration = Duration::from_secs(60);
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
/// Recently deleted endpoints that are checked for rows of late producers.
const DELETED_MAX: i64 = 10_000;

/// Shards to search.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) shards: Vec<(Shard, Epoch)>,
    pub(crate) reason: Reason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// Nothing is known of these shards yet.
    Taken,
    /// Everything should be known already.
    Sweep,
}

/// An endpoint with work.
#[derive(Debug, Clone, Copy, FromRow)]
pub(crate) struct Found {
    pub(crate) endpoint: EndpointId,
    pub(crate) shard: Shard,
    /// The lowest of its rows in the queue.
    pub(crate) first: Option<EventId>,
    /// When the earliest of its retries is due.
    pub(crate) next_due: Option<DateTime<Utc>>,
}

/// Results sent to the engine.
#[derive(Debug)]
pub(crate) enum Report {
    Found {
        reason: Reason,
        epochs: Vec<(Shard, Epoch)>,
        endpoints: Vec<Found>,
    },
    /// A sweep is complete, with its duration.
    Swept(Duration),
}

pub(crate) struct Surveyor {
    connection: DedicatedConnection,
    requests: mpsc::UnboundedReceiver<Request>,
    out: mpsc::UnboundedSender<EngineMessage>,
    /// A requested sweep that waits for takeovers to be served.
    sweep: Option<Request>,
    page: i64,
    logged_at: Option<Instant>,
}

impl Surveyor {
    pub(crate) fn new(
        connector: Connector,
        requests: mpsc::UnboundedReceiver<Request>,
        out: mpsc::UnboundedSender<EngineMessage>,
    ) -> Self {
        Self {
            connection: DedicatedConnection::new(connector),
            requests,
            out,
            sweep: None,
            page: PAGE_MAX,
            logged_at: None,
        }
    }

    /// Runs until the engine is gone or `stop` is cancelled.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let work = async {
            while let Some(request) = self.next_request().await {
                self.survey(request).await;
            }
        };
        stop.run_until_cancelled(work).await;
    }

    /// Takeovers come before a sweep.
    async fn next_request(&mut self) -> Option<Request> {
        loop {
            let request = match self.requests.try_recv() {
                Ok(request) => request,
                Err(_) if self.sweep.is_some() => return self.sweep.take(),
                Err(_) => self.requests.recv().await?,
            };
            match request.reason {
                Reason::Taken => return Some(request),
                Reason::Sweep => self.sweep = Some(request),
            }
        }
    }

    async fn survey(&mut self, request: Request) {
        let began = Instant::now();
        let shards: Vec<Shard> = request.shards.iter().map(|(shard, _)| *shard).collect();
        if request.reason == Reason::Taken {
            let deleted = self.find(&shards, None).await;
            self.report(&request, deleted);
        }
        let mut after = EndpointId(0);
        loop {
            let page = self.find(&shards, Some(after)).await;
            let last = page.last().map(|found| found.endpoint);
            self.report(&request, page);
            match last {
                Some(last) => after = last,
                None => break,
            }
            if request.reason == Reason::Sweep {
                self.serve_takeovers().await;
            }
        }
        if request.reason == Reason::Sweep {
            let _ = self
                .out
                .send(EngineMessage::Surveyed(Report::Swept(began.elapsed())));
        }
    }

    /// Serves takeovers between two pages of a sweep, which may take long.
    async fn serve_takeovers(&mut self) {
        while let Ok(request) = self.requests.try_recv() {
            if request.reason == Reason::Taken {
                Box::pin(self.survey(request)).await;
            }
        }
    }

    fn report(&self, request: &Request, mut endpoints: Vec<Found>) {
        endpoints.retain(|found| found.first.is_some() || found.next_due.is_some());
        if !endpoints.is_empty() {
            let _ = self.out.send(EngineMessage::Surveyed(Report::Found {
                reason: request.reason,
                epochs: request.shards.clone(),
                endpoints,
            }));
        }
    }

    /// The endpoints after this one, or with `None` the deleted ones. Retries until the query succeeds. A slow page makes
    /// the next one smaller, so that results arrive sooner.
    async fn find(&mut self, shards: &[Shard], after: Option<EndpointId>) -> Vec<Found> {
        let (mut backoff, mut limit) = (RETRY, STATEMENT_FIRST_MAX);
        loop {
            let (began, page) = (Instant::now(), self.page);
            let found = async {
                let connection = self.connection.open().await?;
                // The server too ends a statement that is given up here.
                sqlx::query("select set_config('statement_timeout', $1, false)")
                    .bind(limit.as_millis().to_string())
                    .execute(&mut *connection)
                    .with_db_timeout()
                    .await?;
                match after {
                    Some(after) => within(limit, live_page(connection, shards, after, page)).await,
                    None => within(limit, deleted_lately(connection, shards)).await,
                }
            };
            let found = found.await;
            self.page = if began.elapsed() > PAGE_TIME {
                (page / 2).max(1)
            } else {
                (page * 2).min(PAGE_MAX)
            };
            match found {
                Ok(found) => return found,
                Err(error) => {
                    if self.logged_at.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
                        self.logged_at = Some(Instant::now());
                        warn_unless_outage!(error, "searching for pending deliveries failed; retrying");
                    }
                    self.connection.close();
                    if began.elapsed() >= limit {
                        limit = (limit * 2).min(STATEMENT_MAX);
                    }
                    tokio::time::sleep(backoff.delay()).await;
                }
            }
        }
    }
}

/// The next endpoints of these shards, with or without work.
async fn live_page(
    connection: &mut PgConnection,
    shards: &[Shard],
    after: EndpointId,
    page: i64,
) -> Result<Vec<Found>, sqlx::Error> {
    sqlx::query_as(include_str!("sql/survey_page.sql"))
        .bind_all((shards, after, page))
        .fetch_all(connection)
        .await
}

/// Recently deleted endpoints that have rows.
async fn deleted_lately(connection: &mut PgConnection, shards: &[Shard]) -> Result<Vec<Found>, sqlx::Error> {
    sqlx::query_as(include_str!("sql/survey_deleted.sql"))
        .bind_all((shards, DELETED_MAX))
        .fetch_all(connection)
        .await
}
