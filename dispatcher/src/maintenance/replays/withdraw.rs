//! Reverts a cancelled replay: queued deliveries that were not sent become what they were: dead letters, delivered,
//! pending retries, or nonexistent.
//!
//! Requested by the engine, which alone knows what is in flight and drops the rest from memory first; it holds back
//! the remaining deliveries of these replays until the withdrawal is reported complete.
//! Invariant: one statement, and only while the shard has the owner and epoch it was requested under, so that no
//! delivery is withdrawn that another dispatcher sends.

use std::time::Duration;

use sqlx::PgPool;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::BEGIN_STEP;
use crate::{
    db_timeout::WithDbTimeout,
    deliver::{engine::EngineMessage, lane::Withdrawal},
};

const AGAIN_WAIT: Duration = Duration::from_millis(50);
const AGAIN_WAIT_MAX: Duration = Duration::from_secs(1);

pub(crate) struct Withdrawer {
    pub(crate) pool: PgPool,
    pub(crate) owner: Uuid,
    pub(crate) withdrawals: mpsc::UnboundedReceiver<Withdrawal>,
    pub(crate) out: mpsc::UnboundedSender<EngineMessage>,
    pub(crate) stop: CancellationToken,
}

impl Withdrawer {
    /// Runs until the engine is gone. The next owner of the shard completes what is left.
    pub(crate) async fn run(mut self) {
        while let Some(asked) = self.withdrawals.recv().await {
            let mut wait = AGAIN_WAIT;
            while let Err(error) = take_back(&self.pool, self.owner, &asked).with_db_timeout().await {
                tracing::warn!(%error, endpoint = %asked.endpoint, "withdrawing a cancelled replay failed; retrying");
                tokio::select! {
                    () = tokio::time::sleep(wait) => wait = (wait * 2).min(AGAIN_WAIT_MAX),
                    () = self.stop.cancelled() => return,
                }
            }
            let _ = self.out.send(EngineMessage::Withdrawn {
                endpoint: asked.endpoint,
                epoch: asked.epoch,
            });
        }
    }
}

async fn take_back(pool: &PgPool, owner: Uuid, asked: &Withdrawal) -> Result<(), sqlx::Error> {
    let mut tx = pool.begin_with(BEGIN_STEP).await?;
    // A row being attempted has a lower number than that attempt; one queued after it does not.
    sqlx::query(
        "with held as materialized (
            select s.shard from postrider.shards s where s.shard = $1 and s.owner = $2 and s.epoch = $3 for share
         ),
         kept as materialized (
            select e.id from postrider.endpoints e where e.id = $4 and e.state <> 'deleted' for share
         ),
         taken as (
            delete from postrider.queue q
            where exists (select from held) and exists (select from kept)
              and q.endpoint_id = $4 and q.replay_id = any($5) and q.was_source is not null
              and not exists (select from unnest($6::uuid[], $7::int[]) a (event_id, number)
                              where a.event_id = q.event_id and q.attempt < a.number)
            returning q.*
         ),
         dead as (
            insert into postrider.dead_letters
                (endpoint_id, event_id, tenant_id, type_id, reason, attempt, died_at, replay_id)
            select endpoint_id, event_id, tenant_id, type_id, was_reason, attempt, was_at, was_replay
            from taken where was_source = 'dead'
         ),
         counted as (
            insert into postrider.dead_letter_counts as c (endpoint_id, type_id, reason, tenant_id, count)
            select endpoint_id, type_id, was_reason, min(tenant_id), count(*) from taken where was_source = 'dead'
            group by endpoint_id, type_id, was_reason
            on conflict (endpoint_id, type_id, reason) do update set count = c.count + excluded.count
         ),
         ended as (
            update postrider.attempts a set final = t.was_source::text::postrider.final_state from taken t
            where a.event_id = t.event_id and a.endpoint_id = t.endpoint_id and a.number = t.attempt
              and t.was_source in ('dead', 'delivered')
         ),
         ended_held as (
            update postrider.attempts_held a set final = t.was_source::text::postrider.final_state from taken t
            where a.event_id = t.event_id and a.endpoint_id = t.endpoint_id and a.number = t.attempt
              and t.was_source in ('dead', 'delivered')
         ),
         waiting as (
            insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, key_id, sequence, replay_id, attempt,
                step, due_at)
            select endpoint_id, event_id, tenant_id, type_id, key_id, sequence, was_replay, attempt, was_step, was_at
            from taken where was_source = 'waiting'
         )
         update postrider.replay_parts p set moved = p.moved - t.count
         from (select replay_id, was_source, count(*) from taken group by replay_id, was_source) t
         join postrider.replays r on r.public_id = t.replay_id
         where p.replay_id = r.id and p.endpoint_id = $4 and p.source = t.was_source",
    )
    .bind(asked.shard)
    .bind(owner)
    .bind(asked.epoch)
    .bind(asked.endpoint)
    .bind(&asked.replays)
    .bind(asked.attempted.iter().map(|(event, _)| event.0).collect::<Vec<_>>())
    .bind(asked.attempted.iter().map(|(_, number)| i32::from(*number)).collect::<Vec<_>>())
    .execute(&mut *tx)
    .await?;
    tx.commit().await
}
