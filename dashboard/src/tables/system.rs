//! Database state: dispatchers and their shards, partitions, sizes. Writes nothing.
//! Row counts are Postgres' own estimates: nothing is scanned for them.

use chrono::{DateTime, Utc};
use sqlx::{FromRow, PgExecutor};

const DISPATCHERS_SHOWN_MAX: i64 = 200;
const PARTITIONS_SHOWN_MAX: i64 = 2_000;
const TABLES_SHOWN_MAX: i64 = 40;

#[derive(Debug, FromRow)]
pub(crate) struct DispatcherRow {
    pub(crate) name: String,
    pub(crate) started_at: DateTime<Utc>,
    pub(crate) expires_at: DateTime<Utc>,
    pub(crate) is_alive: bool,
    pub(crate) leaving: bool,
    pub(crate) shards: Vec<i16>,
}

pub(crate) async fn dispatchers(db: impl PgExecutor<'_>) -> sqlx::Result<Vec<DispatcherRow>> {
    sqlx::query_as(
        "select d.name, d.started_at, d.expires_at, d.expires_at > clock_timestamp() as is_alive, d.leaving,
            coalesce((select array_agg(s.shard order by s.shard) from postrider.shards s where s.owner = d.id),
                '{}') as shards
         from postrider.dispatchers d
         order by is_alive desc, d.started_at limit $1",
    )
    .bind(DISPATCHERS_SHOWN_MAX)
    .fetch_all(db)
    .await
}

#[derive(Debug, FromRow)]
pub(crate) struct ShardRow {
    pub(crate) shard: i16,
    pub(crate) epoch: i64,
    /// The owning dispatcher, if it is alive.
    pub(crate) owner: Option<String>,
    pub(crate) endpoints: i64,
}

pub(crate) async fn shards(db: impl PgExecutor<'_>) -> sqlx::Result<Vec<ShardRow>> {
    sqlx::query_as(
        "select s.shard, s.epoch, d.name as owner, coalesce(e.count, 0) as endpoints
         from postrider.shards s
         left join postrider.dispatchers d on d.id = s.owner and d.expires_at > clock_timestamp()
         left join (select shard, count(*) as count from postrider.endpoints where state <> 'deleted' group by shard) e
            on e.shard = s.shard
         order by s.shard",
    )
    .fetch_all(db)
    .await
}

/// A table, or a partition of one.
#[derive(Debug, FromRow)]
pub(crate) struct TableRow {
    pub(crate) name: String,
    pub(crate) rows: i64,
    pub(crate) bytes: i64,
}

/// Partitions of `events` and `attempts`, newest day first.
pub(crate) async fn partitions(db: impl PgExecutor<'_>) -> sqlx::Result<Vec<TableRow>> {
    sqlx::query_as(
        "select c.relname::text as name, coalesce(s.n_live_tup, 0) as rows, pg_total_relation_size(c.oid) as bytes
         from pg_inherits i
         join pg_class c on c.oid = i.inhrelid
         left join pg_stat_all_tables s on s.relid = c.oid
         where i.inhparent in ('postrider.events'::regclass, 'postrider.attempts'::regclass) and c.relkind = 'r'
         order by c.relname desc limit $1",
    )
    .bind(PARTITIONS_SHOWN_MAX)
    .fetch_all(db)
    .await
}

/// All other tables, largest first.
pub(crate) async fn tables(db: impl PgExecutor<'_>) -> sqlx::Result<Vec<TableRow>> {
    sqlx::query_as(
        "select c.relname::text as name, coalesce(s.n_live_tup, 0) as rows, pg_total_relation_size(c.oid) as bytes
         from pg_class c
         left join pg_stat_all_tables s on s.relid = c.oid
         where c.relnamespace = 'postrider'::regnamespace and c.relkind = 'r' and not c.relispartition
         order by bytes desc, name limit $1",
    )
    .bind(TABLES_SHOWN_MAX)
    .fetch_all(db)
    .await
}

#[derive(Debug, FromRow)]
pub(crate) struct DatabaseRow {
    pub(crate) version: String,
    pub(crate) name: String,
    pub(crate) bytes: i64,
    pub(crate) connections: i64,
    pub(crate) connections_max: i32,
    /// Age of the oldest open transaction.
    pub(crate) oldest_seconds: Option<f64>,
}

pub(crate) async fn database(db: impl PgExecutor<'_>) -> sqlx::Result<DatabaseRow> {
    sqlx::query_as(
        "select current_setting('server_version') as version, current_database()::text as name,
            pg_database_size(current_database()) as bytes,
            (select count(*) from pg_stat_activity where backend_type = 'client backend') as connections,
            current_setting('max_connections')::int as connections_max,
            (select extract(epoch from max(clock_timestamp() - xact_start))::float8 from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid()) as oldest_seconds",
    )
    .fetch_one(db)
    .await
}
