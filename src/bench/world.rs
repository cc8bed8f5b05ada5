//! What a scenario runs in: a database of its own, the sink, and a real Postrider process.

use std::{
    collections::BTreeMap,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use postrider_dispatcher::vault::{Owner, Purpose, Vault};
use postrider_proto::{EndpointId, TenantId};
use sqlx::{
    AssertSqlSafe, Connection, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStdout, Command},
};

use super::{BODY_DATA, NETWORK, sink::Received, usage};
use crate::{admin, embedded::Cluster, roles};

const START_WAIT: Duration = Duration::from_secs(30);
const TEMPLATE: &str = "bench_template";
const API_KEY: &str = "prk_benchmark_0123456789abcdef0123456789";

/// The server, the sink and the template that every scenario's database is copied from.
pub(super) struct Ground {
    cluster: Cluster,
    sink: Child,
    pub(super) sink_port: u16,
    pub(super) http: reqwest::Client,
    master_key: String,
    databases: u32,
    profile: bool,
}

impl Ground {
    pub(super) async fn prepare(cluster: Cluster, profile: bool) -> anyhow::Result<Self> {
        let (sink, mut lines) = start_self(&["bench-sink"], &[])?;
        let sink_port = lines
            .next_line()
            .await?
            .context("the sink did not start")?
            .trim()
            .parse()?;
        let superuser = PgPoolOptions::new()
            .connect_with(cluster.superuser_options())
            .await?;
        sqlx::raw_sql(AssertSqlSafe(format!(
            "create database {TEMPLATE} owner postrider"
        )))
        .execute(&superuser)
        .await?;
        superuser.close().await;
        let template = PgPoolOptions::new()
            .connect_with(cluster.options().database(TEMPLATE))
            .await?;
        let retention = postrider_dispatcher::Settings::default().retention;
        roles::bring_up_to_date(&template, retention).await?;
        template.close().await;
        let http = reqwest::Client::builder().no_proxy().build()?;
        Ok(Self {
            cluster,
            sink,
            sink_port,
            http,
            master_key: admin::new_master_key(),
            databases: 0,
            profile,
        })
    }

    pub(super) async fn world(&mut self) -> anyhow::Result<World> {
        self.world_from(TEMPLATE).await
    }

    /// Without our schema: the program makes it as its settings say.
    pub(super) async fn empty_world(&mut self) -> anyhow::Result<World> {
        self.world_from("template0").await
    }

    async fn world_from(&mut self, template: &str) -> anyhow::Result<World> {
        self.databases += 1;
        let name = format!("bench_{}", self.databases);
        let superuser = PgPoolOptions::new()
            .connect_with(self.cluster.superuser_options())
            .await?;
        sqlx::raw_sql(AssertSqlSafe(format!(
            "create database {name} template {template} owner postrider"
        )))
        .execute(&superuser)
        .await?;
        superuser.close().await;
        let options = self.cluster.options().database(&name);
        let pool = PgPoolOptions::new()
            .max_connections(20)
            .connect_with(options.clone())
            .await?;
        self.http
            .get(format!("http://127.0.0.1:{}/reset", self.sink_port))
            .send()
            .await?;
        Ok(World {
            pool,
            url: self.cluster.url().replace("/postrider?", &format!("/{name}?")),
            options,
            vault: Vault::parse(&self.master_key)?,
            master_key: self.master_key.clone(),
            http: self.http.clone(),
            sink_port: self.sink_port,
            processes: Vec::new(),
            settings: Vec::new(),
        })
    }

    /// Starts the database's own accounting anew.
    pub(super) async fn begin_profile(&self) -> anyhow::Result<()> {
        if self.profile {
            let mut superuser = PgConnection::connect_with(&self.cluster.superuser_options()).await?;
            sqlx::raw_sql(
                "create extension if not exists pg_stat_statements; select pg_stat_statements_reset()",
            )
            .execute(&mut superuser)
            .await?;
        }
        Ok(())
    }

    /// The statements that took the longest, also those inside functions.
    pub(super) async fn print_profile(&self) -> anyhow::Result<()> {
        if !self.profile {
            return Ok(());
        }
        let mut superuser = PgConnection::connect_with(&self.cluster.superuser_options()).await?;
        let rows: Vec<(f64, i64, i64, bool, String)> = sqlx::query_as(
            "select total_exec_time, calls, rows, toplevel, left(regexp_replace(query, '\\s+', ' ', 'g'), 110)
             from pg_stat_statements order by total_exec_time desc limit 16",
        )
        .fetch_all(&mut superuser)
        .await?;
        for (ms, calls, rows, top, query) in rows {
            eprintln!(
                "  {ms:>8.0} ms {calls:>7} calls {rows:>8} rows {} {query}",
                if top { "  " } else { "in" }
            );
        }
        Ok(())
    }

    pub(super) fn sink_cpu(&self) -> Duration {
        self.sink.id().map(usage::cpu).unwrap_or_default()
    }

    pub(super) fn postgres_cpu(&self) -> Duration {
        self.cluster.pid().map(usage::cpu_of_tree).unwrap_or_default()
    }
}

pub(super) struct World {
    pub(super) pool: PgPool,
    pub(super) options: PgConnectOptions,
    url: String,
    vault: Vault,
    master_key: String,
    pub(super) http: reqwest::Client,
    sink_port: u16,
    pub(super) processes: Vec<Process>,
    /// Beyond what every scenario has.
    pub(super) settings: Vec<(&'static str, &'static str)>,
}

/// A Postrider process of this scenario.
pub(super) struct Process {
    child: Child,
    pub(super) api: String,
    pub(super) metrics: String,
    _folder: tempfile::TempDir,
}

impl Process {
    pub(super) fn pid(&self) -> u32 {
        self.child.id().unwrap_or(0)
    }

    pub(super) async fn kill(&mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }
}

impl World {
    /// Dispatcher, API and dashboard in one process, as a small installation runs them.
    pub(super) async fn start(&mut self) -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let data_dir = folder.path().display().to_string();
        let settings = [
            ("POSTRIDER_DATABASE_URL", self.url.as_str()),
            ("POSTRIDER_DATA_DIR", &data_dir),
            ("POSTRIDER_LISTEN", "127.0.0.1:0"),
            ("POSTRIDER_METRICS_LISTEN", "127.0.0.1:0"),
            ("POSTRIDER_MASTER_KEY", &self.master_key),
            ("POSTRIDER_ADMIN_API_KEY", API_KEY),
            ("POSTRIDER_ALLOW_NETWORKS", NETWORK),
            ("POSTRIDER_ALLOW_HTTP", "true"),
            ("POSTRIDER_LOG", "warn,postrider::roles=info"),
            ("POSTRIDER_LOG_FORMAT", "json"),
        ];
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("up")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command.envs(settings).envs(self.settings.iter().copied());
        let mut child = command.spawn()?;
        let mut lines = BufReader::new(child.stderr.take().context("no log")?).lines();
        let mut addresses = BTreeMap::new();
        let heard = async {
            while addresses.len() < 2 {
                let line = lines.next_line().await?.context("Postrider ended at its start")?;
                let value: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
                if let (Some(service), Some(address)) = (value["service"].as_str(), value["address"].as_str())
                {
                    addresses.insert(service.to_owned(), address.to_owned());
                }
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(START_WAIT, heard)
            .await
            .context("Postrider did not start")??;
        // Its log goes on to ours: a warning in a benchmark is worth reading.
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                eprintln!("{line}");
            }
        });
        let at = |service: &str| {
            addresses
                .get(service)
                .map(|at| format!("http://{at}"))
                .unwrap_or_default()
        };
        self.processes.push(Process {
            child,
            api: at("api"),
            metrics: at("health"),
            _folder: folder,
        });
        Ok(())
    }

    /// When every shard is owned, deliveries flow.
    pub(super) async fn wait_until_owned(&self, dispatchers: i64) -> anyhow::Result<()> {
        self.wait("every shard to have an owner", START_WAIT, || async {
            let owned: (i64, i64) =
                sqlx::query_as("select count(owner), count(distinct owner) from postrider.shards")
                    .fetch_one(&self.pool)
                    .await?;
            Ok(owned == (64, dispatchers))
        })
        .await
    }

    pub(super) async fn wait<F>(
        &self,
        what: &str,
        most: Duration,
        mut done: impl FnMut() -> F,
    ) -> anyhow::Result<()>
    where
        F: Future<Output = anyhow::Result<bool>>,
    {
        let end = Instant::now() + most;
        while !done().await? {
            if Instant::now() > end {
                bail!("waited {} s for {what}, in vain", most.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Tenants `t0`, `t1`, … with one type, and endpoints of each at the sink's path.
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
        .bind(from)
        .bind(to)
        .bind(url)
        .bind(concurrency)
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
            .bind(ids)
            .bind(sealed)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// One event in a transaction of its own.
    pub(super) async fn emit(&self, tenant: i32) -> anyhow::Result<()> {
        sqlx::query("select postrider.emit('t' || $1, 'bench.ran', $2)")
            .bind(tenant)
            .bind(BODY_DATA)
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
        .bind(each)
        .bind(from)
        .bind(to)
        .bind(BODY_DATA)
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Dead letters of one tenant's endpoint, as a long failure would have left them.
    pub(super) async fn pile_up_dead(&self, count: i64, tenant: i32) -> anyhow::Result<()> {
        sqlx::query(
            "with made as (
                 insert into postrider.events (id, tenant_id, type_id, schema_id, body)
                 select postrider.uuid_at(clock_timestamp()), t.id, y.id, s.id, convert_to('{\"data\":' || $3 || '}', 'UTF8')
                 from generate_series(1, $1) g
                 join postrider.tenants t on t.slug = 't' || $2,
                 postrider.event_types y join postrider.schemas s on s.type_id = y.id
                 where y.name = 'bench.ran'
                 returning id, tenant_id, type_id
             ), tried as (
                 insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                                                 outcome, status, final)
                 select m.id, e.id, 7, m.tenant_id, m.type_id, clock_timestamp(), 10, 2, 503, 'dead'
                 from made m join postrider.endpoints e on e.tenant_id = m.tenant_id
             ), counted as (
                 insert into postrider.dead_letter_counts (endpoint_id, type_id, reason, tenant_id, count)
                 select e.id, m.type_id, 'exhausted', m.tenant_id, count(*)
                 from made m join postrider.endpoints e on e.tenant_id = m.tenant_id group by 1, 2, 4
             )
             insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, attempt)
             select e.id, m.id, m.tenant_id, m.type_id, 'exhausted', 7
             from made m join postrider.endpoints e on e.tenant_id = m.tenant_id",
        )
        .bind(count)
        .bind(tenant)
        .bind(BODY_DATA)
        .execute(&self.pool)
        .await?;
        sqlx::raw_sql("analyze postrider.dead_letters; analyze postrider.attempts; analyze postrider.events")
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Of a tenant's endpoints.
    pub(super) async fn set_state(&self, tenant: &str, state: &str) -> anyhow::Result<()> {
        sqlx::query(
            "update postrider.endpoints e set state = $2::postrider.endpoint_state
             from postrider.tenants t where t.id = e.tenant_id and t.slug = $1",
        )
        .bind(tenant)
        .bind(state)
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// A past day with its partitions, and attempts in them as deliveries would have left them.
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
        .bind(day.and_time(chrono::NaiveTime::MIN).and_utc())
        .bind(attempts)
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

    /// In all tables of the schema.
    pub(super) async fn stored_bytes(&self) -> anyhow::Result<i64> {
        Ok(sqlx::query_scalar(
            "select sum(pg_total_relation_size(oid))::bigint from pg_class
             where relnamespace = 'postrider'::regnamespace and relkind = 'r'",
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// A call of the API of the process that was started last.
    pub(super) async fn call(
        &self,
        method: reqwest::Method,
        path: &str,
        body: serde_json::Value,
    ) -> anyhow::Result<serde_json::Value> {
        let process = self.processes.last().context("no process")?;
        let answer = self
            .http
            .request(method, format!("{}/v1{path}", process.api))
            .bearer_auth(API_KEY)
            .header("content-type", "application/json")
            .body(body.to_string())
            .send()
            .await?
            .error_for_status()?;
        Ok(serde_json::from_str(&answer.text().await?).unwrap_or_default())
    }

    /// Rows as `emit` would have left them, for backlogs that would take long to emit.
    pub(super) async fn pile_up(&self, events: i64, from: i32, to: i32) -> anyhow::Result<()> {
        sqlx::query(
            "with made as (
                 insert into postrider.events (id, tenant_id, type_id, schema_id, body)
                 select postrider.uuid_at(clock_timestamp()), t.id, y.id, s.id, convert_to('{\"data\":' || $4 || '}', 'UTF8')
                 from generate_series(1, $1) g
                 join postrider.tenants t on t.slug = 't' || ($2 + g % ($3 - $2)),
                 postrider.event_types y join postrider.schemas s on s.type_id = y.id
                 where y.name = 'bench.ran'
                 returning id, tenant_id, type_id
             )
             insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
             select e.id, m.id, e.shard, m.tenant_id, m.type_id
             from made m join postrider.endpoints e on e.tenant_id = m.tenant_id",
        )
        .bind(events)
        .bind(from)
        .bind(to)
        .bind(BODY_DATA)
        .execute(&self.pool)
        .await?;
        sqlx::raw_sql("analyze postrider.queue")
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    pub(super) async fn emit_http(&self, tenant: &str) -> anyhow::Result<()> {
        self.emit_request(tenant, BODY_DATA)?
            .send()
            .await?
            .error_for_status()?;
        Ok(())
    }

    pub(super) fn emit_request(&self, tenant: &str, data: &str) -> anyhow::Result<reqwest::RequestBuilder> {
        let process = self.processes.first().context("no process")?;
        Ok(self
            .http
            .post(format!("{}/v1/tenants/{tenant}/events", process.api))
            .bearer_auth(API_KEY)
            .header("content-type", "application/json")
            .body(format!(r#"{{"type":"bench.ran","data":{data}}}"#)))
    }

    pub(super) async fn received(&self, group: &str) -> anyhow::Result<Received> {
        let url = format!("http://127.0.0.1:{}/stats", self.sink_port);
        let mut all: BTreeMap<String, Received> = self.http.get(url).send().await?.json().await?;
        Ok(all.remove(group).unwrap_or_default())
    }

    pub(super) async fn forget_received(&self) -> anyhow::Result<()> {
        self.http
            .get(format!("http://127.0.0.1:{}/reset", self.sink_port))
            .send()
            .await?;
        Ok(())
    }

    pub(super) async fn wait_received(&self, group: &str, count: u64, most: Duration) -> anyhow::Result<()> {
        self.wait("deliveries to arrive", most, || async {
            Ok(self.count(group).await? >= count)
        })
        .await
    }

    pub(super) async fn count(&self, group: &str) -> anyhow::Result<u64> {
        let url = format!("http://127.0.0.1:{}/counts", self.sink_port);
        let all: BTreeMap<String, u64> = self.http.get(url).send().await?.json().await?;
        Ok(all.get(group).copied().unwrap_or_default())
    }

    /// The sum and the count of a histogram of the first process.
    pub(super) async fn histogram(&self, name: &str) -> anyhow::Result<(f64, f64)> {
        let process = self.processes.first().context("no process")?;
        let text = self
            .http
            .get(format!("{}/metrics", process.metrics))
            .send()
            .await?
            .text()
            .await?;
        let value = |suffix: &str| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(&format!("{name}_{suffix} ")));
            line.and_then(|value| value.trim().parse().ok()).unwrap_or(0.0)
        };
        Ok((value("sum"), value("count")))
    }

    pub(super) fn cpu(&self) -> Duration {
        self.processes
            .iter()
            .map(|process| usage::cpu(process.pid()))
            .sum()
    }

    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        for process in &mut self.processes {
            process.kill().await?;
        }
        self.pool.close().await;
        Ok(())
    }
}

/// This very program in another role of the benchmark.
pub(super) fn start_self(
    arguments: &[&str],
    settings: &[(&str, &str)],
) -> anyhow::Result<(Child, tokio::io::Lines<BufReader<ChildStdout>>)> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    command.envs(settings.iter().copied());
    let mut child = command.spawn()?;
    let lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    Ok((child, lines))
}
