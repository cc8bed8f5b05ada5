//! Cells: whether they follow the directory, and whether events reach them. An installation with one database has no finding.

use sqlx::{Connection, FromRow, PgConnection};

use super::{CONNECT_TIME_MAX, Finding, counted};
use crate::{cells::HOME, connector::Connector, db_timeout::within};

/// An event that has waited longer is not just on its way.
const WAITS_SECONDS: f64 = 60.0;
/// WAL that a slot keeps for a cell.
const BEHIND_BYTES: i64 = 1 << 30;

pub(super) async fn findings(
    db: &mut PgConnection,
    home: Option<&Connector>,
) -> Result<Vec<Finding>, sqlx::Error> {
    let (cell, others): (i16, bool) = sqlx::query_as(
        "select c.id, exists (select from postrider.cells where id <> 0) from postrider.this_cell c",
    )
    .fetch_one(&mut *db)
    .await?;
    Ok(match (cell, others) {
        (HOME, false) => Vec::new(),
        (HOME, true) => vec![slots(db).await?, outbox(db).await?],
        (cell, _) => vec![subscription(db).await?, reaches_home(cell, home).await],
    })
}

#[derive(FromRow)]
struct Slot {
    name: String,
    follows: Option<bool>,
    behind_bytes: Option<i64>,
    is_lost: Option<bool>,
}

/// At home.
async fn slots(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "cells.directory";
    let slots: Vec<Slot> = sqlx::query_as(
        "select c.name, s.active as follows, s.wal_status = 'lost' as is_lost,
                pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn)::bigint as behind_bytes
         from postrider.cells c
         left join pg_replication_slots s on s.slot_name = (
             select format('postrider_%s_cell_%s', d.oid, c.id) from pg_database d where d.datname = current_database())
         where c.id <> 0 order by c.id",
    )
    .fetch_all(db)
    .await?;
    let named = |wrong: fn(&Slot) -> bool| -> String {
        let names: Vec<&str> = slots
            .iter()
            .filter(|slot| wrong(slot))
            .map(|slot| slot.name.as_str())
            .collect();
        names.join(", ")
    };
    let without = named(|slot| slot.follows.is_none() || slot.is_lost == Some(true));
    let away = named(|slot| slot.follows == Some(false));
    let behind = named(|slot| slot.behind_bytes.is_some_and(|bytes| bytes > BEHIND_BYTES));
    Ok(if !without.is_empty() {
        Finding::error(
            CHECK,
            format!(
                "the replication slot is gone, so that changes of tenants and types don't arrive: {without}"
            ),
            "docs/cells.md, \"When the replication slot is lost\".",
        )
        .in_bundles("the replication slot of a cell is gone")
    } else if !away.is_empty() {
        Finding::warning(
            CHECK,
            format!("not connected, so that this server keeps its write-ahead log for: {away}"),
            "Check the cell's server and its log. Changes of tenants and types wait.",
        )
        .in_bundles("a cell is not connected")
    } else if !behind.is_empty() {
        Finding::warning(
            CHECK,
            format!("more than 1 GiB of write-ahead log behind: {behind}"),
            "Check the load of the cell's server, and long transactions here.",
        )
        .in_bundles("a cell is more than 1 GiB behind")
    } else {
        let cells = i64::try_from(slots.len()).unwrap_or_default();
        let found = counted(cells, "cell follows", "cells follow");
        Finding::ok(CHECK, format!("{found} the directory"))
    })
}

/// At home.
async fn outbox(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "cells.outbox";
    let (late, oldest, refused, waiting): (Option<String>, Option<f64>, i64, i64) = sqlx::query_as(
        "select string_agg(c.name, ', ' order by c.id) filter (where o.seconds > $1), max(o.seconds)::float8,
                (select count(*) from (select from postrider.cell_outbox_refused limit 1000) r),
                (select count(*) from (select from postrider.cell_outbox o join postrider.tenants t on t.id = o.tenant_id
                                       where o.cell_id is null and not t.moving
                                         and o.created_at < clock_timestamp() - make_interval(secs => $1) limit 1000) w)
         from postrider.cells c
         cross join lateral (
             select extract(epoch from clock_timestamp() - o.created_at) as seconds from postrider.cell_outbox o
             where o.cell_id = c.id order by o.xid, o.n limit 1
         ) o",
    )
    .bind(WAITS_SECONDS)
    .fetch_one(db)
    .await?;
    Ok(match (late, waiting, refused) {
        (Some(names), ..) => Finding::warning(
            CHECK,
            format!(
                "events wait, the oldest for {:.0} s, for: {names}",
                oldest.unwrap_or_default()
            ),
            "Check that the cell's dispatchers run, with POSTRIDER_HOME_DATABASE_URL, and their log.",
        )
        .in_bundles("events wait for a cell"),
        (None, 1.., _) => Finding::warning(
            CHECK,
            counted(
                waiting,
                "event waits for its tenant",
                "events wait for their tenants",
            ),
            "A quota is used, or a transaction in the cell holds the id or the ordering key: docs/runbooks/PostriderCellBehind.md.",
        ),
        (None, _, 0) => Finding::ok(CHECK, "no event waits for more than a minute"),
        (None, _, count) => Finding::warning(
            CHECK,
            counted(
                count,
                "event was refused by its cell",
                "events were refused by their cells",
            ),
            "postrider.cell_outbox_refused has them with the reasons. Emit what is still needed, then delete them.",
        ),
    })
}

/// In a cell.
async fn subscription(db: &mut PgConnection) -> Result<Finding, sqlx::Error> {
    const CHECK: &str = "cells.directory";
    let state: Option<(bool, bool)> = sqlx::query_as(
        "select s.subenabled, w.pid is not null
         from pg_subscription s join pg_database d on d.oid = s.subdbid
         left join pg_stat_subscription w on w.subid = s.oid and w.relid is null
         where d.datname = current_database() and s.subname = 'postrider_home'",
    )
    .fetch_optional(db)
    .await?;
    Ok(match state {
        None => Finding::error(
            CHECK,
            "this cell has no subscription to the directory",
            "Run `postrider cells add` with its name again.",
        ),
        Some((false, _)) => Finding::error(
            CHECK,
            "the subscription is disabled, so that changes of tenants and types don't arrive",
            "As a superuser: `alter subscription postrider_home enable`. If it was disabled by an error, the server's log has it.",
        ),
        Some((true, false)) => Finding::warning(
            CHECK,
            "not connected to the home database: changes of tenants and types don't arrive",
            "Deliveries go on. Check the home database's server, and this server's log.",
        ),
        Some((true, true)) => Finding::ok(CHECK, "follows the home database"),
    })
}

/// In a cell.
async fn reaches_home(cell: i16, home: Option<&Connector>) -> Finding {
    const CHECK: &str = "cells.home";
    let Some(home) = home else {
        return Finding::error(
            CHECK,
            "POSTRIDER_HOME_DATABASE_URL is not set here",
            "Set it for the dispatchers of a cell: events that are emitted at home reach it by their relay.",
        );
    };
    let asked = async {
        let mut connection = home.connect().await?;
        let known: bool = sqlx::query_scalar(
            "select (select id from postrider.this_cell) = 0 and exists (select from postrider.cells where id = $1)",
        )
        .bind(cell)
        .fetch_one(&mut connection)
        .await?;
        connection.close().await?;
        Ok(known)
    };
    match within(CONNECT_TIME_MAX, asked).await {
        Ok(true) => Finding::ok(CHECK, format!("it knows this database as cell {cell}")),
        Ok(false) => Finding::error(
            CHECK,
            "the database of POSTRIDER_HOME_DATABASE_URL is not home, or does not know this cell",
            "Set the home database's URL, or run `postrider cells add` there.",
        ),
        Err(error) => Finding::warning(
            CHECK,
            format!("it does not respond: {error}"),
            "Deliveries go on. Events that are emitted at home wait there.",
        ),
    }
}
