//! Carries out bulk replays: queues their deliveries a few at a time, as fast as they are sent and as the requested
//! rate allows, until all were attempted. A replay can be interrupted and resumed anywhere, even twice at once.
//!
//! Every process looks for replays whose next step is due and takes turns (`turns.rs`). The due time is stored in the
//! database, so that a blocked replay costs little, however many processes there are.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{
    DeadReason, DeliveryState, EndpointId, EndpointState, EventId, Failure, ReplayId, ReplayKind,
    ReplaySource, ReplayState, TenantId, TypeId,
};
use sqlx::{Connection, FromRow, PgConnection, PgPool, Postgres, Transaction};
use tokio::task::{self, JoinSet};
use tokio_util::sync::CancellationToken;

use super::{
    Ask, BEGIN_STEP, QUEUED_MAX,
    chosen::bounds,
    turns::{Due, TENANT_AT_ONCE_MAX, Turns},
};
use crate::{
    Wake,
    backoff::Backoff,
    bind::BindAll,
    db_timeout::WithDbTimeout,
    deliver::change_watcher::Commits,
    health::database::warn_unless_outage,
    store::transitions::{Moved, replay_batch},
};

/// Poll interval for new replays, unless they are notified.
const LOOK_EVERY: Duration = Duration::from_millis(500);
const LOOK_AGAIN_AFTER_ERROR: Duration = Duration::from_secs(2);
/// Replays considered per poll.
const DUE_MAX: i64 = 1_000;
/// A turn that is not over by then was interrupted: another process may resume the replay.
const TURN_TIMEOUT: Duration = Duration::from_secs(6);
/// Length of one turn, so that others have theirs soon.
const PARTS_PER_TURN: usize = 16;
const TURN_TIME_MAX: Duration = Duration::from_millis(500);
/// Between two turns while deliveries move, and at most when they do not.
const STEP_WAIT: Duration = Duration::from_millis(50);
const STEP: Backoff = Backoff::new(STEP_WAIT, Duration::from_secs(10));
const ERROR_WAIT: Duration = Duration::from_secs(1);
/// A turn in which nothing could move keeps its slot this long: however many replays are blocked, they cost the database
/// little.
const IDLE_PAUSE: Duration = Duration::from_millis(100);
/// How much of a measurement remains in the displayed rate a second later.
const MEASURE_KEPT: f64 = 0.7;

/// Dependencies of running replays.
#[derive(Clone)]
pub(crate) struct Runner {
    pub(crate) pool: PgPool,
    pub(crate) wake: Wake,
    pub(crate) commits: Commits,
    /// Events older than this may be dropped at any moment.
    pub(crate) retention: Duration,
    pub(crate) stop: CancellationToken,
}

/// Result of a turn: the greatest of its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Round {
    Nothing,
    /// Deliveries were queued: the rate decides when more may follow.
    Moved,
    /// More can be done at once: other parts, or events that were only scanned.
    More,
    Failed,
}

impl Round {
    fn and(self, step: Self) -> Self {
        self.max(step)
    }

    /// Delay until the next turn, given the one before this.
    fn wait(self, before: Duration, rate_per_second: i32) -> Duration {
        let doubled = STEP.after(before);
        match self {
            Self::Nothing => doubled,
            Self::Moved => STEP_WAIT.max(Duration::from_secs(1) / rate_per_second.max(1).unsigned_abs()),
            Self::More => STEP_WAIT,
            Self::Failed => doubled.max(ERROR_WAIT),
        }
    }
}

enum Look {
    Movable(Vec<PartRow>),
    Stuck,
    Over,
}

#[derive(FromRow)]
struct ListedRow {
    id: ReplayId,
    tenant_id: TenantId,
    wait_ms: i64,
}

#[derive(FromRow)]
struct ClaimedRow {
    idle_ms: i32,
    rate_per_second: i32,
}

#[derive(FromRow)]
struct PartRow {
    endpoint_id: EndpointId,
    source: ReplaySource,
}

/// A part and its replay, locked until the step is committed.
#[derive(FromRow)]
struct HeldPart {
    public_id: String,
    tenant_id: TenantId,
    kind: ReplayKind,
    type_id: Option<TypeId>,
    reason: Option<DeadReason>,
    failure: Option<Failure>,
    since: Option<DateTime<Utc>>,
    until: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
    rate_per_second: i32,
    after_event: EventId,
    endpoint_state: EndpointState,
    queued: i64,
    now: DateTime<Utc>,
    stepped_at: Option<DateTime<Utc>>,
}

impl Runner {
    /// Runs until stopped. Another process resumes what is left.
    pub(crate) async fn run(self) {
        let mut turns = Turns::default();
        let mut running = JoinSet::new();
        let mut begun: HashMap<task::Id, Due> = HashMap::new();
        while !self.stop.is_cancelled() {
            let begun_due = self.begin_due(&mut turns, &mut running, &mut begun).await;
            let wait = begun_due.unwrap_or_else(|error| {
                warn_unless_outage!(error, "listing due replays failed; retrying");
                Some(LOOK_AGAIN_AFTER_ERROR)
            });
            tokio::select! {
                Some(ended) = running.join_next_with_id() => {
                    let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
                    if let Some(due) = begun.remove(&id) {
                        turns.end(due);
                    }
                }
                () = self.wait(wait) => {}
                () = self.stop.cancelled() => {}
            }
        }
        while running.join_next().await.is_some() {}
    }

    /// That long, or until a replay is requested.
    async fn wait(&self, time: Option<Duration>) {
        match time {
            Some(time) => tokio::time::sleep(time).await,
            None => self.commits.wait_for_replays(LOOK_EVERY).await,
        }
    }

    /// Starts due turns. Returns when to poll again, unless a turn ends before that; none if no replay is running.
    async fn begin_due(
        &self,
        turns: &mut Turns,
        running: &mut JoinSet<()>,
        begun: &mut HashMap<task::Id, Due>,
    ) -> Result<Option<Duration>, sqlx::Error> {
        if turns.are_all_taken() {
            return Ok(Some(LOOK_EVERY));
        }
        let listed = self.list().with_db_timeout().await?;
        if listed.is_empty() && !self.is_any_running().with_db_timeout().await? {
            return Ok(None);
        }
        let later = listed
            .iter()
            .map(|row| row.wait_ms)
            .filter(|wait| *wait > 0)
            .min();
        let due = listed.iter().filter(|row| row.wait_ms <= 0);
        let mut due: Vec<Due> = due
            .map(|row| Due {
                tenant: row.tenant_id,
                replay: row.id,
            })
            .collect();
        while let Some(one) = turns.next(&mut due) {
            turns.begin(one);
            let runner = self.clone();
            let turn = running.spawn(async move { runner.turn(one.replay).await });
            begun.insert(turn.id(), one);
        }
        Ok(Some(later.map_or(LOOK_EVERY, |ms| {
            Duration::from_millis(ms.unsigned_abs()).min(LOOK_EVERY)
        })))
    }

    async fn is_any_running(&self) -> Result<bool, sqlx::Error> {
        sqlx::query_scalar("select exists (select from postrider.replays where state = 'running')")
            .fetch_one(&self.pool)
            .await
    }

    /// Replays whose next step is due or soon will be: a few per tenant.
    async fn list(&self) -> Result<Vec<ListedRow>, sqlx::Error> {
        sqlx::query_as(
            "select id, tenant_id, ceil(extract(epoch from step_at - clock_timestamp()) * 1000)::bigint as wait_ms
             from (
                select r.id, r.tenant_id, r.step_at,
                    row_number() over (partition by r.tenant_id order by r.step_at, r.id) as place
                from postrider.replays r
                join postrider.tenants t on t.id = r.tenant_id and t.is_here
                where r.state = 'running' and r.step_at < clock_timestamp() + $1 * interval '1 millisecond'
             ) r
             where place <= $2 order by step_at, id limit $3",
        )
        .bind_all((millis(LOOK_EVERY), 2 * TENANT_AT_ONCE_MAX as i64, DUE_MAX))
        .fetch_all(&self.pool)
        .await
    }

    async fn turn(&self, id: ReplayId) {
        let pause = self.take_turn(id).await.unwrap_or_else(|error| {
            warn_unless_outage!(error, replay = %id, "replay turn failed; retrying");
            ERROR_WAIT
        });
        self.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }

    /// All of it on one connection. Returns how much longer the slot is kept.
    async fn take_turn(&self, id: ReplayId) -> Result<Duration, sqlx::Error> {
        let mut connection = self.pool.acquire().await?;
        let Some(claimed) = claim(&mut connection, id).with_db_timeout().await? else {
            return Ok(IDLE_PAUSE);
        };
        let before = Duration::from_millis(claimed.idle_ms.max(0).unsigned_abs().into());
        let parts = match look(&mut connection, id, before).with_db_timeout().await? {
            Look::Movable(parts) => parts,
            Look::Stuck => return Ok(IDLE_PAUSE),
            Look::Over => return Ok(Duration::ZERO),
        };
        let round = self.round(&mut connection, id, &parts).await?;
        let wait = round.wait(before, claimed.rate_per_second);
        let rested = async {
            let mut tx = connection.begin_with(BEGIN_STEP).await?;
            rest(&mut tx, id, wait).await?;
            tx.commit().await
        };
        rested.with_db_timeout().await?;
        Ok(Duration::ZERO)
    }

    /// One step of each part. A database error in one does not affect the others.
    async fn round(
        &self,
        connection: &mut PgConnection,
        id: ReplayId,
        parts: &[PartRow],
    ) -> Result<Round, sqlx::Error> {
        let began = Instant::now();
        let mut round = Round::Nothing;
        for part in parts {
            if self.stop.is_cancelled() || began.elapsed() > TURN_TIME_MAX {
                return Ok(Round::More);
            }
            round = round.and(match self.step(connection, id, part).with_db_timeout().await {
                Ok(None) => Round::Nothing,
                Ok(Some(0)) => Round::More,
                Ok(Some(_)) => {
                    self.wake.now();
                    Round::Moved
                }
                Err(error @ sqlx::Error::Database(_)) => {
                    warn_unless_outage!(error, replay = %id, endpoint = %part.endpoint_id, "replay step failed; retrying");
                    Round::Failed
                }
                Err(error) => return Err(error),
            });
        }
        if parts.len() == PARTS_PER_TURN {
            round = round.and(Round::More);
        }
        Ok(round)
    }

    /// One transaction: take, queue, move the cursor. Returns how many were queued; `None` when the part is blocked.
    async fn step(
        &self,
        connection: &mut PgConnection,
        id: ReplayId,
        part: &PartRow,
    ) -> Result<Option<i64>, sqlx::Error> {
        let mut tx = connection.begin_with(BEGIN_STEP).await?;
        let Some(held) = hold(&mut tx, id, part).await? else {
            return Ok(None);
        };
        let mut moved = Moved {
            moved: 0,
            last: None,
            exhausted: true,
        };
        if matches!(held.endpoint_state, EndpointState::Active | EndpointState::Paused) {
            let limit = held.allowance();
            if limit < 1 {
                return Ok(None);
            }
            let ask = held.ask(part.endpoint_id);
            let oldest = held.now - chrono::TimeDelta::from_std(self.retention).unwrap_or_default();
            let mut bounds = bounds(&ask, held.created_at, oldest);
            bounds.after = held.after_event;
            let (source, endpoint) = (part.source, part.endpoint_id);
            moved = replay_batch(&mut *tx, source, endpoint, &bounds, limit, &held.public_id).await?;
        }
        sqlx::query(
            "update postrider.replay_parts
             set moved = moved + $4, after_event = coalesce($5, after_event), ended = $6,
                 stepped_at = case when $4 > 0 then clock_timestamp() else stepped_at end,
                 skipped = case when $6 then greatest(total - moved - $4, 0) else skipped end,
                 total = case when $6 then greatest(total, moved + $4) else total end
             where replay_id = $1 and endpoint_id = $2 and source = $3::postrider.replay_source",
        )
        .bind_all((id, part.endpoint_id, part.source, moved.moved, moved.last))
        .bind(moved.exhausted)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(Some(moved.moved))
    }
}

/// `None` when another process was faster, the replay is over, or it is being changed.
async fn claim(connection: &mut PgConnection, id: ReplayId) -> Result<Option<ClaimedRow>, sqlx::Error> {
    sqlx::query_as(
        "with due as (
            select id from postrider.replays
            where id = $1 and state = 'running' and step_at <= clock_timestamp() for no key update skip locked
         )
         update postrider.replays r set step_at = clock_timestamp() + $2 * interval '1 millisecond'
         from due where r.id = due.id
         returning r.idle_ms, r.rate_per_second",
    )
    .bind_all((id, millis(TURN_TIMEOUT)))
    .fetch_optional(connection)
    .await
}

/// The parts that can move. If there are none, the replay is over or its next turn is later.
async fn look(connection: &mut PgConnection, id: ReplayId, before: Duration) -> Result<Look, sqlx::Error> {
    let mut tx = connection.begin_with(BEGIN_STEP).await?;
    let parts = movable(&mut tx, id).await?;
    let look = match parts.is_empty() {
        false => Look::Movable(parts),
        true if finish(&mut tx, id).await? => Look::Over,
        true => {
            rest(&mut tx, id, Round::Nothing.wait(before, 1)).await?;
            Look::Stuck
        }
    };
    tx.commit().await?;
    Ok(look)
}

/// `None` when another process holds it, or the replay is over.
async fn hold(
    tx: &mut Transaction<'_, Postgres>,
    id: ReplayId,
    part: &PartRow,
) -> Result<Option<HeldPart>, sqlx::Error> {
    let row: Option<HeldPart> = sqlx::query_as(include_str!("../sql/replay_hold_part.sql"))
        .bind_all((id, part.endpoint_id, part.source))
        .fetch_optional(&mut **tx)
        .await?;
    // A cancellation waits for this step, and no step comes after it.
    let state: Option<ReplayState> =
        sqlx::query_scalar("select state from postrider.replays where id = $1 for share")
            .bind(id)
            .fetch_optional(&mut **tx)
            .await?;
    Ok(row.filter(|_| state == Some(ReplayState::Running)))
}

/// Parts that can make progress: there is space in the queue, and the rate allows it. Those that have waited longest
/// come first.
async fn movable(connection: &mut PgConnection, id: ReplayId) -> Result<Vec<PartRow>, sqlx::Error> {
    sqlx::query_as(include_str!("../sql/replay_movable_parts.sql"))
        .bind_all((id, QUEUED_MAX, PARTS_PER_TURN as i64))
        .fetch_all(connection)
        .await
}

/// Complete when every part is and none of its deliveries is queued.
async fn finish(connection: &mut PgConnection, id: ReplayId) -> Result<bool, sqlx::Error> {
    let done = sqlx::query(
        "update postrider.replays r set state = 'done', ended_at = clock_timestamp()
         where r.id = $1 and r.state = 'running'
           and not exists (select from postrider.replay_parts p where p.replay_id = r.id and not p.ended)
           and not exists (select from postrider.replay_parts p
                           join postrider.queue q on q.endpoint_id = p.endpoint_id and q.replay_id = r.public_id
                           where p.replay_id = r.id)",
    )
    .bind(id)
    .execute(connection)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Sets when the next turn is due and, once a second, the measured rate.
async fn rest(connection: &mut PgConnection, id: ReplayId, wait: Duration) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../sql/replay_rest.sql"))
        .bind_all((id, i32::try_from(wait.as_millis()).unwrap_or(i32::MAX)))
        .bind(MEASURE_KEPT)
        .execute(connection)
        .await?;
    Ok(())
}

fn millis(wait: Duration) -> i64 {
    i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)
}

impl HeldPart {
    fn allowance(&self) -> i64 {
        let since = |at: DateTime<Utc>| (self.now - at).to_std().unwrap_or_default();
        allowance(self.rate_per_second, self.queued, self.stepped_at.map(since))
    }

    fn ask(&self, endpoint: EndpointId) -> Ask {
        Ask {
            tenant: self.tenant_id,
            kind: self.kind,
            endpoint: Some(endpoint),
            state: None::<DeliveryState>,
            type_id: self.type_id,
            reason: self.reason,
            failure: self.failure,
            since: self.since,
            until: self.until,
        }
    }
}

/// How many may be queued now: limited by free space and by the rate since the last step.
fn allowance(rate_per_second: i32, queued: i64, since_last_step: Option<Duration>) -> i64 {
    let since = since_last_step.unwrap_or(STEP_WAIT).min(Duration::from_secs(1));
    let paced = (f64::from(rate_per_second) * since.as_secs_f64()).floor() as i64;
    let first = i64::from(since_last_step.is_none());
    paced.max(first).min(QUEUED_MAX - queued)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_that_cannot_move_looks_less_and_less_often() {
        let max = Duration::from_secs(10);
        let mut wait = Round::Moved.wait(max, 1_000);
        assert_eq!(wait, STEP_WAIT);
        for _ in 0..20 {
            let next = Round::Nothing.wait(wait, 1_000);
            assert!(next == wait * 2 || next == max);
            wait = next;
        }
        assert_eq!(wait, max);
        assert_eq!(Round::Moved.wait(wait, 4), Duration::from_millis(250), "its pace");
        assert_eq!(Round::More.wait(wait, 4), STEP_WAIT);
        assert!(Round::Failed.wait(Duration::ZERO, 4) >= ERROR_WAIT);
        assert_eq!(Round::Moved.and(Round::Nothing), Round::Moved);
        assert_eq!(
            Round::Failed.and(Round::More),
            Round::Failed,
            "it is not tried at once"
        );
    }

    #[test]
    fn a_replay_of_everything_has_few_deliveries_queued_and_keeps_its_pace() {
        let ms = |ms| Some(Duration::from_millis(ms));
        for (rate, queued, since, expected) in [
            (100, 0, ms(50), 5),
            (100, 0, ms(5), 0),
            // The first step takes at least one, and a long pause earns no more than a second's worth.
            (1, 0, None, 1),
            (100, 0, ms(60_000), 100),
            // However high the rate, the space is limited.
            (100_000, 0, ms(1_000), QUEUED_MAX),
            (100_000, QUEUED_MAX - 3, ms(1_000), 3),
            (100_000, QUEUED_MAX, ms(1_000), 0),
        ] {
            assert_eq!(
                allowance(rate, queued, since),
                expected,
                "{rate} {queued} {since:?}"
            );
        }
    }
}
