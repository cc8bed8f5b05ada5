//! What a scenario runs in: its own database, the sink, and real Postrider processes.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use data_encoding::BASE64;
use postrider_dispatcher::vault::Vault;
use postrider_embedded::Cluster;
use sqlx::{
    AssertSqlSafe, Connection, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStdout, Command},
};

use crate::{BODY_DATA, NETWORK, bring_up_to_date, sink::Received, usage};

const START_WAIT: Duration = Duration::from_secs(30);
const TEMPLATE: &str = "bench_template";
const API_KEY: &str = "prk_benchmark_0123456789abcdef0123456789";

/// The server, the sink and the template that every scenario's database is copied from.
pub(super) struct Ground {
    cluster: Cluster,
    /// The program that is measured.
    program: PathBuf,
    sink: Child,
    pub(super) sink_port: u16,
    pub(super) http: reqwest::Client,
    master_key: String,
    databases: u32,
    profile: bool,
}

impl Ground {
    pub(super) async fn prepare(cluster: Cluster, program: PathBuf, profile: bool) -> anyhow::Result<Self> {
        let (sink, mut lines) = start_self(&["sink"])?;
        let sink_port = lines
            .next_line()
            .await?
            .context("the sink did not start")?
            .trim()
            .parse()?;
        create_database(&cluster, &format!("{TEMPLATE} owner postrider")).await?;
        let template = PgPoolOptions::new()
            .connect_with(cluster.options().database(TEMPLATE))
            .await?;
        bring_up_to_date(&template).await?;
        // Copies of it are not taken for restored ones.
        sqlx::query("update postrider.sending set identity = null")
            .execute(&template)
            .await?;
        template.close().await;
        let http = reqwest::Client::builder().no_proxy().build()?;
        Ok(Self {
            cluster,
            program,
            sink,
            sink_port,
            http,
            master_key: BASE64.encode(&rand::random::<[u8; 32]>()),
            databases: 0,
            profile,
        })
    }

    pub(super) async fn world(&mut self) -> anyhow::Result<World> {
        self.world_from(TEMPLATE).await
    }

    /// Without our schema: the program creates it according to its settings.
    pub(super) async fn empty_world(&mut self) -> anyhow::Result<World> {
        self.world_from("template0").await
    }

    async fn world_from(&mut self, template: &str) -> anyhow::Result<World> {
        self.databases += 1;
        let name = format!("bench_{}", self.databases);
        create_database(
            &self.cluster,
            &format!("{name} template {template} owner postrider"),
        )
        .await?;
        let options = self.cluster.options().database(&name);
        let pool = PgPoolOptions::new()
            .max_connections(20)
            .connect_with(options.clone())
            .await?;
        let world = World {
            pool,
            program: self.program.clone(),
            url: self.cluster.url().replace("/postrider?", &format!("/{name}?")),
            options,
            vault: Vault::parse(&self.master_key)?,
            master_key: self.master_key.clone(),
            http: self.http.clone(),
            sink_port: self.sink_port,
            processes: Vec::new(),
            settings: Vec::new(),
        };
        world.forget_received().await?;
        Ok(world)
    }

    /// Resets the database's own statistics.
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

    /// The slowest statements, including those inside functions.
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
    program: PathBuf,
    url: String,
    pub(super) vault: Vault,
    master_key: String,
    pub(super) http: reqwest::Client,
    pub(super) sink_port: u16,
    pub(super) processes: Vec<Process>,
    /// In addition to those of every scenario.
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
        let mut command = Command::new(&self.program);
        command
            .arg("up")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command.envs(settings).envs(self.settings.iter().copied());
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        let mut lines = BufReader::new(child.stderr.take().context("no log")?).lines();
        let mut addresses = BTreeMap::new();
        let listening = async {
            while addresses.len() < 2 {
                let line = lines.next_line().await?.context("Postrider exited at startup")?;
                let value: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
                if let (Some(service), Some(address)) = (value["service"].as_str(), value["address"].as_str())
                {
                    addresses.insert(service.to_owned(), address.to_owned());
                }
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(START_WAIT, listening)
            .await
            .context("Postrider did not start in time")??;
        // Its log is passed on: a warning in a benchmark is worth reading.
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

    /// Deliveries start when every shard has an owner.
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
                bail!("timed out after {} s waiting for {what}", most.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Calls the API of the process that was started last.
    pub(super) async fn call(
        &self,
        method: reqwest::Method,
        path: &str,
        body: serde_json::Value,
    ) -> anyhow::Result<serde_json::Value> {
        let process = self.processes.last().context("no process")?;
        let response = self
            .http
            .request(method, format!("{}/v1{path}", process.api))
            .bearer_auth(API_KEY)
            .header("content-type", "application/json")
            .body(body.to_string())
            .send()
            .await?
            .error_for_status()?;
        Ok(serde_json::from_str(&response.text().await?).unwrap_or_default())
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
            .body(event(data, "")))
    }

    async fn ask_sink(&self, path: &str) -> reqwest::Result<reqwest::Response> {
        let url = format!("http://127.0.0.1:{}{path}", self.sink_port);
        self.http.get(url).send().await
    }

    pub(super) async fn received(&self, group: &str) -> anyhow::Result<Received> {
        let mut all: BTreeMap<String, Received> = self.ask_sink("/stats").await?.json().await?;
        Ok(all.remove(group).unwrap_or_default())
    }

    pub(super) async fn forget_received(&self) -> anyhow::Result<()> {
        self.ask_sink("/reset").await?;
        Ok(())
    }

    pub(super) async fn wait_received(&self, group: &str, count: u64, most: Duration) -> anyhow::Result<()> {
        self.wait("deliveries to arrive", most, || async {
            Ok(self.count(group).await? >= count)
        })
        .await
    }

    pub(super) async fn count(&self, group: &str) -> anyhow::Result<u64> {
        let all: BTreeMap<String, u64> = self.ask_sink("/counts").await?.json().await?;
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

async fn create_database(cluster: &Cluster, definition: &str) -> anyhow::Result<()> {
    let mut superuser = PgConnection::connect_with(&cluster.superuser_options()).await?;
    sqlx::raw_sql(AssertSqlSafe(format!("create database {definition}")))
        .execute(&mut superuser)
        .await?;
    Ok(superuser.close().await?)
}

/// An event as HTTP takes it. `more` are further fields, each followed by a comma.
pub(super) fn event(data: &str, more: &str) -> String {
    format!(r#"{{"type":"bench.ran",{more}"data":{data}}}"#)
}

/// This program in another role, as a process of its own.
pub(super) fn start_self(
    arguments: &[&str],
) -> anyhow::Result<(Child, tokio::io::Lines<BufReader<ChildStdout>>)> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    let lines = BufReader::new(child.stdout.take().context("no standard output")?).lines();
    Ok((child, lines))
}
