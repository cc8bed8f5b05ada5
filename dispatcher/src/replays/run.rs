//! A bulk replay's job: puts its deliveries in line a few at a time, as fast as they are sent and as fast as was asked
//! for, until all were tried. It can be cut off anywhere and begun again anywhere, also twice at once.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{
    DeadReason, DeliveryState, EndpointId, EndpointState, EventId, ReplayId, ReplayKind, ReplaySource,
    ReplayState, TenantId, TypeId,
};
use sqlx::{FromRow, PgPool, Postgres, Transaction};
use tokio_util::sync::CancellationToken;

use super::{
    Ask, BEGIN_STEP, IN_LINE_MAX,
    chosen::{Bounds, Moved, put_in_line},
};
use crate::Wake;

/// Between two steps while deliveries move, and at most when they do not.
const STEP_WAIT: Duration = Duration::from_millis(50);
const STEP_WAIT_MAX: Duration = Duration::from_secs(1);
const MEASURE_EVERY: Duration = Duration::from_secs(1);
/// How much of the latest measurement goes into the rate that is shown.
const MEASURE_WEIGHT: f32 = 0.3;

/// What the job is run with.
#[derive(Clone)]
pub(crate) struct Runner {
    pub(crate) pool: PgPool,
    pub(crate) wake: Wake,
    /// Events older than this may be gone at any moment.
    pub(crate) retention: Duration,
    pub(crate) stop: CancellationToken,
}

/// The program stops before the replay is over: another one goes on with it.
#[derive(Debug, thiserror::Error)]
#[error("stopped before the replay was over")]
pub(crate) struct Interrupted;

enum Round {
    Moved,
    Nothing,
    Over,
}

#[derive(FromRow)]
struct PartRow {
    endpoint_id: EndpointId,
    source: ReplaySource,
}

/// A part and its replay, held until the step is committed.
#[derive(FromRow)]
struct HeldPart {
    public_id: String,
    tenant_id: TenantId,
    kind: ReplayKind,
    type_id: Option<TypeId>,
    reason: Option<DeadReason>,
    since: Option<DateTime<Utc>>,
    until: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
    rate_per_second: i32,
    after_event: EventId,
    endpoint_state: EndpointState,
    in_line: i64,
    now: DateTime<Utc>,
}

impl Runner {
    pub(crate) async fn run(&self, id: ReplayId) -> Result<(), Interrupted> {
        let mut wait = STEP_WAIT;
        let mut steps = HashMap::new();
        let mut measured: Option<(Instant, i64)> = None;
        loop {
            match self.round(id, &mut steps, &mut measured).await {
                Ok(Round::Over) => return Ok(()),
                Ok(Round::Moved) => wait = STEP_WAIT,
                Ok(Round::Nothing) => wait = (wait * 2).min(STEP_WAIT_MAX),
                Err(error) => {
                    tracing::warn!(replay = %id, %error, "a step of a replay failed; trying again");
                    wait = STEP_WAIT_MAX;
                }
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.stop.cancelled() => return Err(Interrupted),
            }
        }
    }

    /// One step of each part, then a look at how far it is.
    async fn round(
        &self,
        id: ReplayId,
        steps: &mut HashMap<(EndpointId, ReplaySource), Instant>,
        measured: &mut Option<(Instant, i64)>,
    ) -> Result<Round, sqlx::Error> {
        let open: Vec<PartRow> = sqlx::query_as(
            "select endpoint_id, source from postrider.replay_parts where replay_id = $1 and not ended
             order by endpoint_id, source",
        )
        .bind(id)
        .fetch_all(&self.pool)
        .await?;
        let mut moved = false;
        for part in &open {
            if self.stop.is_cancelled() {
                break;
            }
            let last = steps.get(&(part.endpoint_id, part.source)).copied();
            if self.step(id, part, last).await? > 0 {
                steps.insert((part.endpoint_id, part.source), Instant::now());
                moved = true;
                self.wake.now();
            }
        }
        self.measure(id, measured).await?;
        if open.is_empty() && self.finish(id).await? {
            return Ok(Round::Over);
        }
        let state: Option<ReplayState> =
            sqlx::query_scalar("select state from postrider.replays where id = $1")
                .bind(id)
                .fetch_optional(&self.pool)
                .await?;
        Ok(match state {
            Some(ReplayState::Running) if moved => Round::Moved,
            Some(ReplayState::Running) => Round::Nothing,
            Some(ReplayState::Done | ReplayState::Cancelled) | None => Round::Over,
        })
    }

    /// One transaction: take, put in line, move the cursor. Answers how many were put in line.
    async fn step(
        &self,
        id: ReplayId,
        part: &PartRow,
        last_step: Option<Instant>,
    ) -> Result<i64, sqlx::Error> {
        let mut tx = self.pool.begin_with(BEGIN_STEP).await?;
        let Some(held) = self.hold(&mut tx, id, part).await? else {
            return Ok(0);
        };
        let mut moved = Moved {
            moved: 0,
            last: None,
            exhausted: true,
        };
        if matches!(held.endpoint_state, EndpointState::Active | EndpointState::Paused) {
            let limit = held.allowance(last_step);
            if limit < 1 {
                return Ok(0);
            }
            let ask = held.ask(part.endpoint_id);
            let oldest = held.now - chrono::TimeDelta::from_std(self.retention).unwrap_or_default();
            let mut bounds = Bounds::of(&ask, held.created_at, oldest);
            bounds.after = held.after_event;
            moved = put_in_line(
                &mut tx,
                part.endpoint_id,
                part.source,
                &bounds,
                limit,
                &held.public_id,
            )
            .await?;
        }
        sqlx::query(
            "update postrider.replay_parts
             set moved = moved + $4, after_event = coalesce($5, after_event), ended = $6,
                 skipped = case when $6 then greatest(total - moved - $4, 0) else skipped end,
                 total = case when $6 then greatest(total, moved + $4) else total end
             where replay_id = $1 and endpoint_id = $2 and source = $3::postrider.replay_source",
        )
        .bind(id)
        .bind(part.endpoint_id)
        .bind(part.source)
        .bind(moved.moved)
        .bind(moved.last)
        .bind(moved.exhausted)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(moved.moved)
    }

    /// None when another one is at it, or the replay is over.
    async fn hold(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        id: ReplayId,
        part: &PartRow,
    ) -> Result<Option<HeldPart>, sqlx::Error> {
        let row: Option<HeldPart> = sqlx::query_as(
            "select r.public_id, r.tenant_id, r.kind, r.type_id, r.reason, r.since, r.until, r.created_at,
                r.rate_per_second, p.after_event, e.state as endpoint_state, clock_timestamp() as now,
                (select count(*) from postrider.queue q
                 where q.endpoint_id = p.endpoint_id and q.replay_id is not null) as in_line
             from postrider.replay_parts p
             join postrider.replays r on r.id = p.replay_id
             join postrider.endpoints e on e.id = p.endpoint_id
             where p.replay_id = $1 and p.endpoint_id = $2 and p.source = $3::postrider.replay_source and not p.ended
             for update of p skip locked",
        )
        .bind(id)
        .bind(part.endpoint_id)
        .bind(part.source)
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

    /// Over when every part is, and nothing of it is in line.
    async fn finish(&self, id: ReplayId) -> Result<bool, sqlx::Error> {
        let done = sqlx::query(
            "update postrider.replays r set state = 'done', ended_at = clock_timestamp()
             where r.id = $1 and r.state = 'running'
               and not exists (select from postrider.replay_parts p where p.replay_id = r.id and not p.ended)
               and not exists (select from postrider.replay_parts p
                               join postrider.queue q on q.endpoint_id = p.endpoint_id and q.replay_id = r.public_id
                               where p.replay_id = r.id)",
        )
        .bind(id)
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() > 0)
    }

    async fn measure(&self, id: ReplayId, measured: &mut Option<(Instant, i64)>) -> Result<(), sqlx::Error> {
        let now = Instant::now();
        if measured.is_some_and(|(at, _)| now - at < MEASURE_EVERY) {
            return Ok(());
        }
        let done: Option<i64> = sqlx::query_scalar(
            "select sum(p.moved - (select count(*) from postrider.queue q
                                   where q.endpoint_id = p.endpoint_id and q.replay_id = r.public_id))::bigint
             from postrider.replays r
             join (select replay_id, endpoint_id, sum(moved) as moved from postrider.replay_parts
                   where replay_id = $1 group by replay_id, endpoint_id) p on p.replay_id = r.id
             where r.id = $1",
        )
        .bind(id)
        .fetch_one(&self.pool)
        .await?;
        let done = done.unwrap_or(0);
        if let Some((at, before)) = measured {
            let rate = (done - *before).max(0) as f32 / (now - *at).as_secs_f32();
            sqlx::query(
                "update postrider.replays
                 set measured_per_second = coalesce(measured_per_second * (1 - $3::real) + $2::real * $3::real, $2::real)
                 where id = $1",
            )
            .bind(id)
            .bind(rate)
            .bind(MEASURE_WEIGHT)
            .execute(&self.pool)
            .await?;
        }
        *measured = Some((now, done));
        Ok(())
    }
}

impl HeldPart {
    fn allowance(&self, last_step: Option<Instant>) -> i64 {
        allowance(
            self.rate_per_second,
            self.in_line,
            last_step.map(|at| at.elapsed()),
        )
    }

    fn ask(&self, endpoint: EndpointId) -> Ask {
        Ask {
            tenant: self.tenant_id,
            kind: self.kind,
            endpoint: Some(endpoint),
            state: None::<DeliveryState>,
            type_id: self.type_id,
            reason: self.reason,
            since: self.since,
            until: self.until,
        }
    }
}

/// How many may be put in line now: there is room for so many, and the pace allows so many since the last step.
fn allowance(rate_per_second: i32, in_line: i64, since_last_step: Option<Duration>) -> i64 {
    let since = since_last_step.unwrap_or(STEP_WAIT).min(Duration::from_secs(1));
    let paced = (f64::from(rate_per_second) * since.as_secs_f64()).floor() as i64;
    let first = i64::from(since_last_step.is_none());
    paced.max(first).min(IN_LINE_MAX - in_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_of_everything_has_few_deliveries_in_line_and_keeps_its_pace() {
        let ms = |ms| Some(Duration::from_millis(ms));
        for (rate, in_line, since, expected) in [
            (100, 0, ms(50), 5),
            (100, 0, ms(5), 0),
            // The first step takes one at least, and a long pause earns no more than a second's worth.
            (1, 0, None, 1),
            (100, 0, ms(60_000), 100),
            // However fast it may be, there is room for so many.
            (100_000, 0, ms(1_000), IN_LINE_MAX),
            (100_000, IN_LINE_MAX - 3, ms(1_000), 3),
            (100_000, IN_LINE_MAX, ms(1_000), 0),
        ] {
            assert_eq!(
                allowance(rate, in_line, since),
                expected,
                "{rate} {in_line} {since:?}"
            );
        }
    }
}
