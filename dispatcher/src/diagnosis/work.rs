//! The work in the database: is it owned, is it moving, is there room for more.

use sqlx::PgConnection;

use super::{Finding, counted};
use crate::store::sending::{self, IDENTITY_ADVICE, IDENTITY_HIDDEN};

/// Partitions are made two weeks ahead.
const DAYS_AHEAD_WARNING: i64 = 7;
const STUCK_SECONDS: f64 = 300.0;
/// Rows looked at for an overdue one.
const LOOKED_AT_MAX: i64 = 10_000;

pub(super) async fn sending(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "work.sending";
    let state = sending::state(&mut *db).await?;
    let (paused, identity): (i64, Option<String>) = sqlx::query_as(
        "select (select count(*) from postrider.tenants where paused_at is not null and deleted_at is null), identity
         from postrider.sending",
    )
    .fetch_one(db)
    .await?;
    let is_hidden = identity
        .as_deref()
        .is_some_and(|identity| identity.starts_with("oids/"));
    Ok(if state.identity_hidden {
        Finding::error(CHECK, format!("stopped: {IDENTITY_HIDDEN}"), IDENTITY_ADVICE)
    } else if state.restored {
        let advice = "`postrider sending resume --confirm-restored`, once the installation it is a copy of no longer sends.";
        Finding::warning(CHECK, "stopped: this database is a restored copy", advice)
    } else if state.stopped {
        let reason = state
            .reason
            .map(|reason| format!(": {reason}"))
            .unwrap_or_default();
        Finding::warning(
            CHECK,
            format!("stopped{reason}"),
            "`postrider sending resume` when the reason is gone.",
        )
        .in_bundles("stopped by an operator")
    } else if paused > 0 {
        Finding::warning(
            CHECK,
            counted(paused, "tenant is paused", "tenants are paused"),
            "`postrider tenants resume TENANT`.",
        )
    } else if identity.is_none() {
        let advice = "Run `postrider migrate`, which remembers the database it is in.";
        Finding::warning(
            CHECK,
            "on, but a restored copy of this database would not be detected",
            advice,
        )
    } else if is_hidden {
        let advice = "Run `grant execute on function pg_catalog.pg_control_system() to …` with Postrider's role as a superuser, \
                      in this database, then `postrider migrate`.";
        Finding::warning(
            CHECK,
            "on, but this role may not execute pg_control_system(): a copy of this database that was restored in the same \
             way as this one might not be detected",
            advice,
        )
    } else {
        Finding::ok(CHECK, "on")
    })
}

pub(super) async fn partitions(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "work.partitions";
    let days: i64 = sqlx::query_scalar(
        "select min(n) from (
             select p.inhparent, count(*) filter (
                 where substring(c.relname from '_([0-9]{8})$') > to_char(clock_timestamp() at time zone 'UTC', 'YYYYMMDD')) as n
             from pg_inherits p join pg_class c on c.oid = p.inhrelid
             where p.inhparent in ('postrider.events'::regclass, 'postrider.attempts'::regclass)
             group by p.inhparent) ahead",
    )
    .fetch_one(db)
    .await?;
    let found = counted(days, "day ahead", "days ahead");
    let advice = "A dispatcher makes them once an hour: check that one runs, and its log. `postrider migrate` makes them, too.";
    Ok(match days {
        0 => Finding::error(CHECK, found, advice),
        days if days < DAYS_AHEAD_WARNING => Finding::warning(CHECK, found, advice),
        _ => Finding::ok(CHECK, found),
    })
}

pub(super) async fn leases(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "work.leases";
    let (unowned, alive, expired): (i64, i64, i64) = sqlx::query_as(
        "select (select count(*) from postrider.shards s
                 where not exists (select from postrider.dispatchers d
                                   where d.id = s.owner and d.expires_at > clock_timestamp())),
                count(*) filter (where expires_at > clock_timestamp()),
                count(*) filter (where expires_at <= clock_timestamp())
         from postrider.dispatchers",
    )
    .fetch_one(db)
    .await?;
    let found = format!(
        "{}, {expired} went away without notice, {unowned} of 64 shards have no owner",
        counted(alive, "dispatcher is running", "dispatchers are running")
    );
    Ok(match (alive, unowned) {
        (0, _) => Finding::error(CHECK, found, "Start a dispatcher: nothing is sent."),
        (_, 0) => Finding::ok(CHECK, found),
        _ => Finding::error(
            CHECK,
            found,
            "Wait ten seconds for a takeover. If it stays, look for lease errors in the log of the dispatchers.",
        ),
    })
}

/// First attempts that nobody makes, although their endpoint is active.
pub(super) async fn stuck(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "work.stuck";
    let (endpoints, oldest): (i64, Option<f64>) = sqlx::query_as(
        "select count(*), max(w.seconds)::float8
         from postrider.endpoints e
         join postrider.tenants t on t.id = e.tenant_id and t.paused_at is null
         cross join lateral (
             select extract(epoch from clock_timestamp() - postrider.uuid_time(q.event_id)) as seconds
             from postrider.queue q where q.endpoint_id = e.id and q.replay_id is null order by q.event_id limit 1
         ) w
         where e.state = 'active' and w.seconds > $1
           and not exists (select from postrider.endpoint_health h where h.endpoint_id = e.id)",
    )
    .bind(STUCK_SECONDS)
    .fetch_one(db)
    .await?;
    let seconds = oldest.unwrap_or(0.0);
    Ok(match endpoints {
        0 => Finding::ok(CHECK, "no healthy endpoint waits for more than five minutes"),
        _ => Finding::warning(
            CHECK,
            format!(
                "deliveries to {} wait, the oldest for {seconds:.0} s",
                counted(endpoints, "healthy endpoint", "healthy endpoints")
            ),
            "Add dispatchers, raise the endpoints' concurrency or rate, and check the leases.",
        ),
    })
}

pub(super) async fn retries(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "work.retries";
    let (overdue, oldest): (i64, Option<f64>) = sqlx::query_as(
        "select count(*), extract(epoch from clock_timestamp() - min(r.due_at))::float8
         from (select r.endpoint_id, r.due_at from postrider.retries r
               where r.due_at < clock_timestamp() - make_interval(secs => $1) limit $2) r
         join postrider.endpoints e on e.id = r.endpoint_id and e.state = 'active'
         join postrider.tenants t on t.id = e.tenant_id and t.paused_at is null",
    )
    .bind(STUCK_SECONDS)
    .bind(LOOKED_AT_MAX)
    .fetch_one(db)
    .await?;
    let seconds = oldest.unwrap_or(0.0);
    Ok(match overdue {
        0 => Finding::ok(CHECK, "none is overdue by more than five minutes"),
        _ => Finding::warning(
            CHECK,
            format!(
                "{} overdue, the first by {seconds:.0} s",
                counted(overdue, "is", "are")
            ),
            "Usual for endpoints that have failed for long and are tried one request at a time. Otherwise check the leases.",
        ),
    })
}
