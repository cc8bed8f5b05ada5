//! The rows of a scenario: tenants, endpoints, events and backlogs, written without the API.

use anyhow::Context;
use postrider_dispatcher::{
    bind::BindAll,
    vault::{Owner, Purpose},
};
use postrider_proto::{EndpointId, TenantId};
use sqlx::AssertSqlSafe;

use crate::{BODY_DATA, world::World};

impl World {
    /// Tenants `t0`, `t1`, … and one event type.
    pub(super) async fn tenants(&self, tenants: i32) -> anyhow::Result<()> {
        sqlx::query("insert into postrider.tenants (slug) select 't' || g from generate_series(0, $1 - 1) g")
            .bind(tenants)
            .execute(&self.pool)
            .await?;
        sqlx::raw_sql(
            "insert into postrider.event_types (name, matches) values ('bench.ran', '{*,bench.*,bench.ran}')
             on conflict do nothing;
             insert into postrider.schemas (type_id, version, schema)
             select id, '2026-01-15', '{}' from postrider.event_types where name = 'bench.ran'",
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// One endpoint for each of the tenants `from..to`.
    pub(super) async fn endpoints(
        &self,
        from: i32,
        to: i32,
        path: &str,
        concurrency: i32,
    ) -> anyhow::Result<()> {
        let url = format!("http://127.0.0.1:{}{path}", self.sink_port);
        let made: Vec<(EndpointId, TenantId)> = sqlx::query_as(
            "insert into postrider.endpoints (public_id, tenant_id, shard, url, concurrency)
             select 'ep_' || gen_random_uuid(), t.id, floor(random() * 64)::int, $3, $4
             from generate_series($1, $2 - 1) g join postrider.tenants t on t.slug = 't' || g
             returning id, tenant_id",
        )
        .bind_all((from, to, url, concurrency))
        .fetch_all(&self.pool)
        .await?;
        let (ids, sealed): (Vec<EndpointId>, Vec<Vec<u8>>) = made
            .into_iter()
            .map(|(endpoint, tenant)| {
                let sealed = self.vault.seal(
                    Owner { tenant, endpoint },
                    Purpose::Secret,
                    b"whsec_BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=",
                );
                (endpoint, sealed)
            })
            .collect();
        sqlx::query("insert into postrider.secrets (endpoint_id, ciphertext) select * from unnest($1::int[], $2::bytea[])")
            .bind_all((ids, sealed))
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// One event in a transaction of its own.
    pub(super) async fn emit(&self, tenant: i32) -> anyhow::Result<()> {
        sqlx::query("select postrider.emit('t' || $1, 'bench.ran', $2)")
            .bind_all((tenant, BODY_DATA))
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// One transaction with so many events for each of the tenants `from..to`.
    pub(super) async fn emit_batch(&self, each: i32, from: i32, to: i32) -> anyhow::Result<()> {
        sqlx::query(
            "select count(*) from generate_series($2, $3 - 1) g
             cross join lateral postrider.emit_batch('t' || g, array_fill('bench.ran'::text, array[$1]),
                                                     array_fill($4::text, array[$1])) b",
        )
        .bind_all((each, from, to, BODY_DATA))
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Dead letters of one tenant's endpoint, as after a long outage.
    pub(super) async fn pile_up_dead(&self, count: i64, tenant: i32) -> anyhow::Result<()> {
        sqlx::query(include_str!("../sql/dead_letters.sql"))
            .bind_all((count, tenant, BODY_DATA))
            .execute(&self.pool)
            .await?;
        sqlx::raw_sql("analyze postrider.dead_letters; analyze postrider.attempts; analyze postrider.events")
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Sets the state of a tenant's endpoints.
    pub(super) async fn set_state(&self, tenant: &str, state: &str) -> anyhow::Result<()> {
        sqlx::query(
            "update postrider.endpoints e set state = $2::postrider.endpoint_state
             from postrider.tenants t where t.id = e.tenant_id and t.slug = $1",
        )
        .bind_all((tenant, state))
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// A past day: its partitions, and attempts in them.
    pub(super) async fn pile_up_day(&self, day: chrono::NaiveDate, attempts: i64) -> anyhow::Result<()> {
        let (name, next) = (day.format("%Y%m%d"), day.succ_opt().context("no next day")?);
        for table in ["events", "attempts"] {
            let make = format!(
                "create table postrider.{table}_{name} (like postrider.{table} including all);
                 do $$ begin execute format(
                    'alter table postrider.{table} attach partition postrider.{table}_{name} for values from (%L) to (%L)',
                    postrider.uuid_floor('{day}T00:00:00Z'), postrider.uuid_floor('{next}T00:00:00Z')); end $$"
            );
            sqlx::raw_sql(AssertSqlSafe(make)).execute(&self.pool).await?;
        }
        sqlx::query(
            "insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                                             outcome, status, final)
             select postrider.uuid_at($1::timestamptz + n * interval '10 milliseconds'), e.id, 1, e.tenant_id, y.id,
                    $1, 10, 1, 200, 'delivered'
             from postrider.endpoints e, postrider.event_types y, generate_series(1, $2) n where y.name = 'bench.ran'",
        )
        .bind_all((day.and_time(chrono::NaiveTime::MIN).and_utc(), attempts))
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Dead letters that a replay has delivered.
    pub(super) async fn delivered_replays(&self) -> anyhow::Result<i64> {
        Ok(sqlx::query_scalar(
            "select count(*) from postrider.attempts where final = 'delivered' and replay_id is not null",
        )
        .fetch_one(&self.pool)
        .await?)
    }

    pub(super) async fn partitions(&self) -> anyhow::Result<Vec<String>> {
        Ok(sqlx::query_scalar(
            "select c.relname::text from pg_inherits i join pg_class c on c.oid = i.inhrelid
             where i.inhparent in ('postrider.events'::regclass, 'postrider.attempts'::regclass) and c.relkind = 'r'",
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Size of all tables of the schema.
    pub(super) async fn stored_bytes(&self) -> anyhow::Result<i64> {
        Ok(sqlx::query_scalar(
            "select sum(pg_total_relation_size(oid))::bigint from pg_class
             where relnamespace = 'postrider'::regnamespace and relkind = 'r'",
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// The rows that `emit` writes, for backlogs that would take long to emit.
    pub(super) async fn pile_up(&self, events: i64, from: i32, to: i32) -> anyhow::Result<()> {
        sqlx::query(include_str!("../sql/backlog.sql"))
            .bind_all((events, from, to, BODY_DATA))
            .execute(&self.pool)
            .await?;
        sqlx::raw_sql("analyze postrider.queue")
            .execute(&self.pool)
            .await?;
        Ok(())
    }
}
