//! Looks for moves and carries each out in a task of its own (`task.rs`), and begins the moves out of cells that are drained.

use std::{collections::HashMap, time::Duration};

use postrider_proto::TenantId;
use sqlx::PgPool;
use tokio::task::{self, JoinSet};
use tokio_util::sync::CancellationToken;

use super::{begin, task::Task};
use crate::{
    connector::Connector, db_timeout::WithDbTimeout, deliver::change_watcher::Commits,
    health::database::warn_unless_outage, vault::Vault,
};

/// Poll interval for requested moves, unless they are notified.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Moves that one process carries out at once.
const MOVES_MAX: usize = 4;
/// Moves that a draining cell has at once.
const DRAINING_MAX: i64 = 2;

pub(crate) struct Mover {
    /// Home, if this is a dispatcher there.
    pub(crate) home: Connector,
    pub(crate) pool: PgPool,
    pub(crate) vault: Vault,
    pub(crate) commits: Commits,
    pub(crate) stop: CancellationToken,
}

impl Mover {
    /// Runs until stopped. Another process continues what is left.
    pub(crate) async fn run(self) {
        let mut running = JoinSet::new();
        let mut begun: HashMap<task::Id, i64> = HashMap::new();
        let mut last = 0;
        while !self.stop.is_cancelled() {
            while let Some(ended) = running.try_join_next_with_id() {
                let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
                begun.remove(&id);
            }
            if let Err(error) = self.begin_some(&mut running, &mut begun, &mut last).await {
                warn_unless_outage!(error, "listing moves of tenants failed; retrying");
            }
            tokio::select! {
                () = self.commits.wait_for_moves(LOOK_EVERY) => {}
                () = self.stop.cancelled() => {}
            }
        }
        while running.join_next().await.is_some() {}
    }

    async fn begin_some(
        &self,
        running: &mut JoinSet<()>,
        begun: &mut HashMap<task::Id, i64>,
        last: &mut i64,
    ) -> Result<(), sqlx::Error> {
        if let Err(error) = self.drain_cells().with_db_timeout().await {
            warn_unless_outage!(error, "draining cells failed; retrying");
        }
        // In turn, beginning after the last one.
        let open: Vec<i64> = sqlx::query_scalar(
            "select id from postrider.tenant_moves where ended_at is null order by id <= $1, id limit 1000",
        )
        .bind(*last)
        .fetch_all(&self.pool)
        .with_db_timeout()
        .await?;
        for id in open {
            if begun.len() >= MOVES_MAX {
                break;
            }
            if begun.values().all(|known| *known != id) {
                *last = id;
                let task = Task::new(self, id);
                begun.insert(running.spawn(task.run()).id(), id);
            }
        }
        Ok(())
    }

    /// Begins the next moves out of cells that are drained, each to the open cell that has the fewest tenants.
    async fn drain_cells(&self) -> Result<(), sqlx::Error> {
        let next: Vec<(TenantId, String)> = sqlx::query_as(include_str!("sql/tenants_to_drain.sql"))
            .bind(DRAINING_MAX)
            .fetch_all(&self.pool)
            .await?;
        for (tenant, target) in next {
            let mut transaction = self.pool.begin().await?;
            // Somebody else may have begun to move it.
            let _ = begin(&mut transaction, tenant, &target, "postrider").await?;
            transaction.commit().await?;
        }
        Ok(())
    }
}
