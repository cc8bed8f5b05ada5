//! Facts about an installation for a support bundle.
//! Invariant: none of them is a secret, a URL, a payload, or the name of a tenant, a person or a type; statements of
//! producers are left out, because they contain data, and so are the names of programs other than ours.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sqlx::PgConnection;

/// Each statement returns one JSON value.
const FACTS: [(&str, &str); 9] = [
    (
        "server",
        "select jsonb_build_object('version', version(), 'database_bytes', pg_database_size(current_database()),
             'started_at', pg_postmaster_start_time(), 'in_recovery', pg_is_in_recovery())",
    ),
    (
        "server_settings",
        "select jsonb_object_agg(name, setting || coalesce(unit, '')) from pg_settings
         where name in ('max_connections', 'shared_buffers', 'work_mem', 'maintenance_work_mem', 'effective_cache_size',
             'wal_level', 'max_wal_size', 'checkpoint_timeout', 'synchronous_commit', 'fsync', 'full_page_writes',
             'autovacuum', 'autovacuum_naptime', 'autovacuum_max_workers', 'autovacuum_vacuum_cost_limit',
             'idle_in_transaction_session_timeout', 'statement_timeout', 'lock_timeout', 'default_transaction_isolation',
             'default_transaction_read_only', 'tcp_keepalives_idle', 'tcp_keepalives_interval', 'tcp_keepalives_count',
             'max_worker_processes', 'random_page_cost', 'jit')",
    ),
    (
        "migrations",
        "select jsonb_agg(jsonb_build_object('version', version, 'applied_at', installed_on) order by version)
         from postrider.schema_migrations",
    ),
    (
        "functions",
        "select jsonb_agg(jsonb_build_object('file', file, 'release', release, 'applied_at', applied_at) order by file)
         from postrider.function_versions",
    ),
    (
        "tables",
        "select jsonb_agg(t.line order by t.bytes desc) from (
             select pg_total_relation_size(c.oid) as bytes,
                    jsonb_build_object('name', c.relname, 'bytes', pg_total_relation_size(c.oid), 'live', s.n_live_tup,
                        'dead', s.n_dead_tup, 'autovacuumed_at', s.last_autovacuum, 'analyzed_at', s.last_autoanalyze) as line
             from pg_class c left join pg_stat_all_tables s on s.relid = c.oid
             where c.relnamespace = 'postrider'::regnamespace and c.relkind = 'r' order by 1 desc limit 200) t",
    ),
    (
        "dispatchers",
        "select coalesce(jsonb_agg(jsonb_build_object('name', d.name, 'started_at', d.started_at, 'expires_at', d.expires_at,
             'leaving', d.leaving, 'applied', d.applied::text,
             'shards', (select count(*) from postrider.shards s where s.owner = d.id)) order by d.started_at), '[]')
         from postrider.dispatchers d",
    ),
    (
        "counts",
        "select jsonb_build_object(
             'tenants', (select count(*) from postrider.tenants where deleted_at is null),
             'tenants_paused', (select count(*) from postrider.tenants where paused_at is not null and deleted_at is null),
             'endpoints', (select coalesce(jsonb_object_agg(state, n), '{}') from (
                 select state, count(*) as n from postrider.endpoints group by state) e),
             'failing_endpoints', (select count(*) from postrider.endpoint_health),
             'dead_letters', (select coalesce(sum(count), 0) from postrider.dead_letter_counts),
             'replays', (select coalesce(jsonb_object_agg(state, n), '{}') from (
                 select state::text, count(*) as n from postrider.replays group by state) r))",
    ),
    (
        "sessions",
        "select jsonb_agg(s.line) from (
             select jsonb_build_object(
                 'application', case when application_name ~ '^postrider (dispatcher|dashboard|reads|migrate|rotate-master-key)$'
                                     then application_name else 'other' end,
                 'state', state, 'wait', wait_event_type || ':' || wait_event,
                 'transaction_seconds', extract(epoch from clock_timestamp() - xact_start)::int,
                 'statement_seconds', extract(epoch from clock_timestamp() - query_start)::int) as line
             from pg_stat_activity where datname = current_database() order by xact_start nulls last limit 300) s",
    ),
    (
        "attempts_last_hour",
        "select coalesce(jsonb_agg(to_jsonb(m) order by m.minute), '[]') from (
             select minute, sum(delivered) as delivered, sum(retried) as retried, sum(dead) as dead
             from postrider.minute_statistics
             where endpoint_id = 0 and minute > clock_timestamp() - interval '1 hour' group by minute) m",
    ),
];

/// By name. One that can't be read has its error instead.
pub async fn facts(db: &mut PgConnection) -> BTreeMap<&'static str, Value> {
    let mut facts = BTreeMap::new();
    for (name, statement) in FACTS {
        let fact: Result<Value, sqlx::Error> = sqlx::query_scalar(statement).fetch_one(&mut *db).await;
        facts.insert(
            name,
            fact.unwrap_or_else(|error| json!({ "error": error.to_string() })),
        );
    }
    facts
}
