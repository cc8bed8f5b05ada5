//! Cells: tenants that live in another database. Their events are emitted at home, in the producer's transaction, and reach the
//! cell exactly once.

use std::{collections::BTreeMap, process::Output, time::Duration};

use postrider_dispatcher::vault::{Owner, Purpose, Vault};
use postrider_proto::{EndpointId, TenantId};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::support::{Database, Launch, MASTER_KEY, Postrider, Receiver, until};

const SERVER: &str = "wal_level = logical
max_wal_senders = 20
max_replication_slots = 20
max_logical_replication_workers = 20
max_worker_processes = 40
";
const TYPE: &str = "invoice.paid";
/// Of cell 1.
const FIRST_ENDPOINT: i64 = 1 << 25;

/// Home, a cell, and the cell's dispatcher.
pub(crate) struct Pair {
    pub(crate) home: Database,
    pub(crate) cell: Database,
    dispatcher: Option<Postrider>,
}

fn add(name: &'static str, home: &Database, cell: &Database) -> Launch {
    Postrider::on_database(name, home)
        .set("POSTRIDER_CELL_DATABASE_URL", cell.url())
        .set("POSTRIDER_CELL_SUPERUSER_URL", cell.url_as("postgres"))
        .set("POSTRIDER_REPLICATION_URL", home.url_as("postgres"))
}

fn said(output: &Output) -> String {
    let both = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&both).into_owned()
}

impl Pair {
    /// With the tenant `acme` in the cell, `beta` at home, and one event type.
    pub(crate) async fn start() -> Self {
        let home = Database::on_private_server_in(std::env::temp_dir(), SERVER).await;
        home.execute_here_as_superuser("alter role postrider replication")
            .await;
        let cell = home.beside().await;
        let output = add("cells add a", &home, &cell).output();
        assert!(output.status.success(), "{}", said(&output));
        home.execute(
            "insert into postrider.tenants (slug, cell_id) values ('acme', 1), ('beta', 0);
             with type as (insert into postrider.event_types (name, matches)
                           values ('invoice.paid', '{*,invoice.*,invoice.paid}') returning id)
             insert into postrider.schemas (type_id, version, schema)
             select id, '2026-01-15', '{\"type\": \"object\"}' from type",
        )
        .await;
        let mut pair = Self {
            home,
            cell,
            dispatcher: None,
        };
        pair.know("select count(*) from postrider.schemas where version = '2026-01-15'")
            .await;
        pair.restart().await;
        pair
    }

    /// Waits until this is something in the cell.
    async fn know(&self, count: &str) {
        until("the cell has heard of it", || async {
            (self.cell.count(count).await > 0).then_some(())
        })
        .await;
    }

    async fn restart(&mut self) {
        let launch = Postrider::on_database("dispatcher", &self.cell)
            .set("POSTRIDER_HOME_DATABASE_URL", self.home.url());
        self.dispatcher = Some(launch.start().await);
    }

    fn kill(&mut self) {
        if let Some(mut dispatcher) = self.dispatcher.take() {
            dispatcher.kill();
        }
    }

    async fn drained(&self) {
        until("the outbox is empty", || async {
            (self
                .home
                .count("select count(*) from postrider.cell_outbox")
                .await
                == 0)
                .then_some(())
        })
        .await;
    }

    /// Sequences and data of a tenant's events, by key.
    async fn sequences(&self, tenant: &str) -> BTreeMap<String, Vec<i64>> {
        let rows: Vec<(String, Vec<u8>)> = sqlx::query_as(
            "select e.ordering_key, e.body from postrider.events e join postrider.tenants t on t.id = e.tenant_id
             where t.slug = $1 and e.ordering_key is not null order by e.ordering_key, e.sequence",
        )
        .bind(tenant)
        .fetch_all(&mut self.cell.connect().await)
        .await
        .expect("read");
        let mut keys: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for (key, body) in rows {
            let body: Value = serde_json::from_slice(&body).expect("JSON");
            let n = body["data"]["n"].as_i64().expect("a number");
            keys.entry(key).or_default().push(n);
        }
        keys
    }
}

/// The block of SQL in docs/cells.md that begins so.
fn in_docs(first: &str) -> String {
    let text = std::fs::read_to_string(crate::statements::root().join("docs/cells.md")).expect("the page");
    let mut blocks = text
        .split("```sql\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next());
    let found = blocks.find(|block| block.starts_with(first));
    found.expect("the block").to_owned()
}

/// As the API would make it, in the tenant's database.
pub(crate) async fn endpoint(database: &Database, tenant: &str, url: &str) -> i64 {
    let mut connection = database.connect().await;
    let (id, tenant): (i32, i32) = sqlx::query_as(
        "insert into postrider.endpoints (public_id, tenant_id, shard, url)
         select 'ep_' || md5($2), id, 3, $2 from postrider.tenants where slug = $1 returning id, tenant_id",
    )
    .bind(tenant)
    .bind(url)
    .fetch_one(&mut connection)
    .await
    .expect("an endpoint");
    let owner = Owner {
        tenant: TenantId(tenant),
        endpoint: EndpointId(id),
    };
    let secret = b"whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";
    let vault = Vault::parse(MASTER_KEY).expect("a key");
    sqlx::query("insert into postrider.secrets (endpoint_id, ciphertext) values ($1, $2)")
        .bind(id)
        .bind(vault.seal(owner, Purpose::Secret, secret))
        .execute(&mut connection)
        .await
        .expect("a secret");
    i64::from(id)
}

/// The id, or the SQLSTATE and the message.
pub(crate) async fn emit(
    connection: &mut PgConnection,
    tenant: &str,
    data: &str,
    id: Option<&str>,
    key: Option<&str>,
) -> Result<String, (String, String)> {
    sqlx::query_scalar("select postrider.emit($1, $2, $3, $4, ordering_key => $5)")
        .bind(tenant)
        .bind(TYPE)
        .bind(data)
        .bind(id)
        .bind(key)
        .fetch_one(connection)
        .await
        .map_err(|error| {
            let error = error.into_database_error().expect("of the database");
            (
                error.code().unwrap_or_default().into_owned(),
                error.message().to_owned(),
            )
        })
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_emitted_at_home_for_a_tenant_elsewhere_arrives_once() {
    let mut pair = Pair::start().await;
    let receiver = Receiver::start().await;
    let made = endpoint(&pair.cell, "acme", &receiver.url("/hook")).await;
    assert_eq!(made, FIRST_ENDPOINT, "the ids of a cell are its own");
    let mut producer = pair.home.producer().await;
    let generated = emit(&mut producer, "acme", "{\"n\": 1}", None, None)
        .await
        .expect("emitted");
    let mut transaction = producer.begin().await.expect("begun");
    emit(&mut transaction, "acme", "{\"n\": 2}", Some("undone"), None)
        .await
        .expect("emitted");
    transaction.rollback().await.expect("rolled back");
    emit(&mut producer, "acme", "{\"n\": 3}", Some("chosen"), None)
        .await
        .expect("emitted");
    let ids: Vec<String> = receiver
        .wait_for(2)
        .await
        .iter()
        .map(|request| request.event_id().to_owned())
        .collect();
    assert!(
        ids.contains(&generated) && ids.contains(&"chosen".to_owned()),
        "{ids:?}"
    );
    pair.drained().await;

    // The id is the cell's to compare now, and the event of before.
    let again = emit(&mut producer, "acme", "{\"n\": 3}", Some("chosen"), None).await;
    assert_eq!(again.as_deref(), Ok("chosen"));
    let again = emit(&mut producer, "acme", "{\"n\": 1}", Some(&generated), None).await;
    assert_eq!(again.as_ref(), Ok(&generated));
    pair.drained().await;
    emit(&mut producer, "acme", "{\"n\": 4}", Some("chosen"), None)
        .await
        .expect("taken at home");
    pair.drained().await;
    let refused = "select refusal || ' ' || id from postrider.cell_outbox_refused";
    assert_eq!(pair.home.text(refused).await, "PR409 chosen");
    assert_eq!(pair.cell.count("select count(*) from postrider.events").await, 2);
    assert_eq!(pair.home.count("select count(*) from postrider.events").await, 0);

    // While it waits here, it is compared here.
    pair.kill();
    for _ in 0..2 {
        let taken = emit(&mut producer, "acme", "{\"n\": 5}", Some("five"), Some("k")).await;
        assert_eq!(taken.as_deref(), Ok("five"));
    }
    let other = emit(&mut producer, "acme", "{\"n\": 6}", Some("five"), Some("k")).await;
    assert_eq!(other.expect_err("refused").0, "PR409");
    assert_eq!(
        pair.home
            .count("select count(*) from postrider.cell_outbox")
            .await,
        1
    );
    // What home knows is refused at once, and several events of here and there go where they belong.
    let unknown = sqlx::query("select postrider.emit('acme', 'invoice.lost', '{}')")
        .execute(&mut producer)
        .await;
    assert!(unknown.expect_err("refused").to_string().contains("not found"));
    let many: Vec<(Option<String>, Option<String>)> = sqlx::query_as(
        "select refusal, id from postrider.emit_all(
             array['acme', 'beta', 'acme', 'nobody', 'acme'], array_fill('invoice.paid'::text, array[5]), array_fill('{}'::text, array[5]),
             array['m1', 'm2', 'm3', 'm4', 'm1'], array_fill(null::text, array[5]), array[null, null, 'k', null, null])
         order by position",
    )
    .fetch_all(&mut pair.home.connect().await)
    .await
    .expect("emitted");
    let ids: Vec<Option<&str>> = many.iter().map(|(_, id)| id.as_deref()).collect();
    assert_eq!(
        ids,
        [Some("m1"), Some("m2"), Some("m3"), None, Some("m1")],
        "{many:?}"
    );
    assert_eq!(many[3].0.as_deref(), Some("PR404"));
    assert_eq!(
        pair.home
            .count("select count(*) from postrider.cell_outbox")
            .await,
        3
    );
    assert_eq!(
        pair.home.count("select count(*) from postrider.events").await,
        1,
        "of beta"
    );
    pair.restart().await;
    pair.drained().await;
    let sequences =
        "select string_agg(chosen_id, ' ' order by sequence) from postrider.events where ordering_key = 'k'";
    assert_eq!(pair.cell.text(sequences).await, "five m3");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_goes_with_its_event() {
    let pair = Pair::start().await;
    sqlx::query(
        "select postrider.emit('acme', 'invoice.paid', '{}', traceparent => $1, tracestate => 'a=b')",
    )
    .bind("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    .execute(&mut pair.home.connect().await)
    .await
    .expect("emitted");
    pair.drained().await;
    let context = "select encode(t.context, 'hex') from postrider.traces t join postrider.events e on e.id = t.event_id";
    let expected = "0af7651916cd43dd8448eb211c80319cb7ad6b716920333101613d62";
    assert_eq!(pair.cell.text(context).await, expected);
}

/// While an old snapshot keeps what was deleted, a plan that scans it makes the relay slower and slower.
#[tokio::test]
async fn the_relay_reads_only_what_it_asks_for_on_tables_that_were_empty() {
    let database = Database::fresh().await;
    database
        .execute("vacuum (analyze, truncate off) postrider.cell_outbox")
        .await;
    let mut connection = database.connect().await;
    sqlx::raw_sql(
        "set plan_cache_mode = force_generic_plan; set enable_seqscan = off; set enable_bitmapscan = off;
         set enable_hashjoin = off; set enable_mergejoin = off",
    )
    .execute(&mut connection)
    .await
    .expect("set");
    for (statement, types, values, expected) in [
        (
            include_str!("../../dispatcher/src/maintenance/relay/sql/outbox_tail.sql"),
            "smallint, xid8[], xid8[], bigint, bigint",
            "1, '{5}', '{9}', 0, 10",
            &[
                "cell_outbox_tail",
                "((cell_id = $1) AND (xid >= r.low) AND (xid < r.high))",
            ][..],
        ),
        (
            include_str!("../../dispatcher/src/maintenance/relay/sql/outbox_page.sql"),
            "bigint[], smallint",
            "'{1}', 1",
            &[
                "(n = u.n)",
                "(id = o.tenant_id)",
                "cell_outbox_waiting",
                "(tenant_id = o.tenant_id)",
            ],
        ),
        (
            include_str!("../../dispatcher/src/maintenance/relay/sql/outbox_waiting_tenants.sql"),
            "smallint, int, bigint",
            "1, 0, 10",
            &["cell_outbox_waiting", "(tenant_id > $2)", "(id = w.tenant_id)"],
        ),
        (
            include_str!("../../dispatcher/src/maintenance/relay/sql/outbox_waiting.sql"),
            "int[], text, bigint, text[], bigint[], text[], text[]",
            "'{1}', '1:1:', 10, '{}', '{}', '{}', '{}'",
            &["cell_outbox_waiting", "(tenant_id = t.id)", "(id = ANY ($1))"],
        ),
    ] {
        let prepare = format!("deallocate all; prepare one ({types}) as {statement}");
        sqlx::raw_sql(AssertSqlSafe(prepare))
            .execute(&mut connection)
            .await
            .expect(statement);
        let lines: Vec<String> = sqlx::query_scalar(AssertSqlSafe(format!("explain execute one ({values})")))
            .fetch_all(&mut connection)
            .await
            .expect(statement);
        let plan = lines.join("\n");
        for part in expected {
            assert!(plan.contains(part), "{part} is not in\n{plan}");
        }
        assert!(!plan.contains("Seq Scan on cell_outbox"), "{plan}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_refuses_events_of_tenants_that_live_elsewhere() {
    let pair = Pair::start().await;
    let mut producer = pair.cell.connect().await;
    emit(&mut producer, "acme", "{}", None, None)
        .await
        .expect("it lives here");
    let (code, message) = emit(&mut producer, "beta", "{}", None, None)
        .await
        .expect_err("refused");
    assert_eq!(code, "PR421");
    assert_eq!(
        message,
        "tenant 'beta' lives in cell 'home': emit in the home database"
    );
    pair.home
        .execute("update postrider.tenants set moving = true where slug = 'acme'")
        .await;
    pair.know("select count(*) from postrider.tenants where moving")
        .await;
    let (code, message) = emit(&mut producer, "acme", "{}", None, None)
        .await
        .expect_err("refused");
    assert_eq!(code, "PR421");
    assert!(message.contains("is moving"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_doubled_through_kills_and_keys_keep_the_order_of_their_commits() {
    const PRODUCERS: usize = 4;
    const EACH: i64 = 250;
    let mut pair = Pair::start().await;
    pair.home
        .execute(
            "create table public.counters (key text primary key, n bigint not null default 0);
             insert into public.counters (key) select 'k' || n from generate_series(0, 2) n",
        )
        .await;
    let mut producers = tokio::task::JoinSet::new();
    for producer in 0..PRODUCERS {
        let mut connection = pair.home.connect().await;
        producers.spawn(async move {
            for n in 0..EACH {
                let key = format!("k{}", n % 3);
                let mut transaction = connection.begin().await.expect("begun");
                // Transactions are numbered in another order than the key's events: a number is taken before the wait.
                sqlx::query("select pg_current_xact_id()")
                    .execute(&mut *transaction)
                    .await
                    .expect("a number");
                let counted: i64 =
                    sqlx::query_scalar("update public.counters set n = n + 1 where key = $1 returning n")
                        .bind(&key)
                        .fetch_one(&mut *transaction)
                        .await
                        .expect("counted");
                let id = format!("p{producer}-{n}");
                let data = format!("{{\"n\": {counted}}}");
                emit(&mut transaction, "acme", &data, Some(&id), Some(&key))
                    .await
                    .expect("emitted");
                transaction.commit().await.expect("committed");
            }
        });
    }
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(400)).await;
        pair.kill();
        pair.restart().await;
    }
    producers.join_all().await;
    pair.drained().await;
    let sequences = pair.sequences("acme").await;
    assert_eq!(sequences.len(), 3);
    for (key, numbers) in &sequences {
        let last = numbers.len() as i64;
        assert_eq!(*numbers, (1..=last).collect::<Vec<_>>(), "of {key}");
    }
    let all: usize = sequences.values().map(Vec::len).sum();
    assert_eq!(all, PRODUCERS * EACH as usize);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_to_wait_holds_up_nobody_else_and_goes_in_order() {
    let pair = Pair::start().await;
    pair.home
        .execute("insert into postrider.tenants (slug, cell_id) values ('gamma', 1)")
        .await;
    pair.know("select count(*) from postrider.tenants where slug = 'gamma'")
        .await;
    let mut producer = pair.home.connect().await;
    // A transaction that keeps every deleted row, for the whole test.
    let mut old = pair.home.connect().await;
    sqlx::raw_sql("begin isolation level repeatable read; select pg_current_xact_id(); select count(*) from postrider.tenants")
        .execute(&mut old)
        .await
        .expect("a snapshot");
    let emit_n = async |producer: &mut PgConnection, tenant: &str, n: i64| {
        let data = format!("{{\"n\": {n}}}");
        emit(producer, tenant, &data, None, Some("k"))
            .await
            .expect("emitted");
    };
    emit_n(&mut producer, "acme", 1).await;
    pair.drained().await;
    pair.home
        .execute("update postrider.tenants set moving = true where slug = 'acme'")
        .await;
    for n in 2..=40 {
        emit_n(&mut producer, "acme", n).await;
        emit_n(&mut producer, "gamma", n).await;
    }
    // One that began before the tenant has come back, and commits later.
    let mut slow = pair.home.connect().await;
    sqlx::raw_sql("begin").execute(&mut slow).await.expect("begun");
    emit(&mut slow, "acme", "{\"n\": 41}", None, Some("other"))
        .await
        .expect("emitted");
    until("the others were relayed", || async {
        (pair.sequences("gamma").await.get("k").map(Vec::len) == Some(39)).then_some(())
    })
    .await;
    assert_eq!(pair.sequences("acme").await["k"], [1]);
    pair.home
        .execute("update postrider.tenants set moving = false where slug = 'acme'")
        .await;
    for n in 41..=60 {
        emit_n(&mut producer, "acme", n).await;
    }
    sqlx::raw_sql("commit")
        .execute(&mut slow)
        .await
        .expect("committed");
    pair.drained().await;
    let sequences = pair.sequences("acme").await;
    assert_eq!(sequences["k"], (1..=60).collect::<Vec<_>>());
    assert_eq!(sequences["other"], [41]);

    // A key that someone holds in the cell.
    let mut holder = pair.cell.connect().await;
    sqlx::raw_sql("begin; select postrider.emit('acme', 'invoice.paid', '{\"n\": 61}', ordering_key => 'k')")
        .execute(&mut holder)
        .await
        .expect("held");
    for n in 62..=70 {
        emit_n(&mut producer, "acme", n).await;
        emit_n(&mut producer, "gamma", n).await;
    }
    until("the others were relayed", || async {
        (pair.sequences("gamma").await.get("k").map(Vec::len) == Some(48)).then_some(())
    })
    .await;
    sqlx::raw_sql("commit")
        .execute(&mut holder)
        .await
        .expect("committed");
    pair.drained().await;
    assert_eq!(pair.sequences("acme").await["k"], (1..=70).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_holds_for_what_is_emitted_at_home() {
    let pair = Pair::start().await;
    pair.home
        .execute("update postrider.tenants set stored_bytes_max = 2000 where slug = 'acme'")
        .await;
    pair.know("select count(*) from postrider.tenants where usage_since is not null")
        .await;
    let mut producer = pair.home.connect().await;
    let refused = until("the quota is used", || async {
        let mut connection = pair.home.connect().await;
        emit(&mut connection, "acme", "{\"n\": 1}", None, None)
            .await
            .err()
    })
    .await;
    assert_eq!(refused.0, "PR507");
    let stored = pair.cell.count("select count(*) from postrider.events").await;
    assert!((10..=15).contains(&stored), "{stored} are stored");
    emit(&mut producer, "beta", "{}", None, None)
        .await
        .expect("another tenant");
    pair.home
        .execute("update postrider.tenants set stored_bytes_max = null where slug = 'acme'")
        .await;
    pair.drained().await;
    until("the quota is forgotten", || async {
        let mut connection = pair.home.connect().await;
        emit(&mut connection, "acme", "{\"n\": 2}", None, None).await.ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operational_events_of_a_cell_reach_the_team_at_home() {
    let pair = Pair::start().await;
    pair.home
        .execute("update postrider.tenants set all_operational_events = true where slug = 'beta'")
        .await;
    pair.know("select count(*) from postrider.tenants where all_operational_events")
        .await;
    pair.cell
        .execute(
            "select postrider.announce(id, 'postrider.secret.rotating', '{\"endpoint\": \"ep_1\"}')
             from postrider.tenants where slug = 'acme'",
        )
        .await;
    let of = "select count(*) from postrider.events e join postrider.tenants t on t.id = e.tenant_id where t.slug = ";
    assert_eq!(pair.cell.count(&format!("{of} 'acme'")).await, 1);
    until("it is at home", || async {
        (pair.home.count(&format!("{of} 'beta'")).await == 1).then_some(())
    })
    .await;
    until("it has left the cell", || async {
        (pair
            .cell
            .count("select count(*) from postrider.cell_outbox")
            .await
            == 0)
            .then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_is_added_once_and_only_to_a_home_that_can_have_it() {
    let pair = Pair::start().await;
    // Again, as after an interruption.
    let output = add("cells add a", &pair.home, &pair.cell).output();
    assert!(output.status.success(), "{}", said(&output));
    let third = pair.home.beside().await;
    for (command, home, cell, expected) in [
        ("cells add b", &pair.home, &pair.cell, "is already cell 1"),
        ("cells add a", &pair.home, &third, "there is already a cell"),
        ("cells add B", &pair.home, &third, "a cell's name is"),
        ("cells add b", &pair.cell, &third, "leads to a cell"),
        ("cells add b", &pair.home, &pair.home, "a database of its own"),
    ] {
        let output = add(command, home, cell).output();
        assert!(!output.status.success(), "{command}: {}", said(&output));
        assert!(said(&output).contains(expected), "{command}: {}", said(&output));
    }
    let output = add("cells add b", &pair.home, &third)
        .unset("POSTRIDER_CELL_SUPERUSER_URL")
        .output();
    assert!(
        said(&output).contains("POSTRIDER_CELL_SUPERUSER_URL"),
        "{}",
        said(&output)
    );
    let output = add("cells add b", &pair.home, &third).output();
    assert!(output.status.success(), "{}", said(&output));
    // On another server, where the write-ahead log has too little.
    let (lone, other) = (Database::fresh().await, Database::fresh().await);
    let output = add("cells add a", &lone, &other).output();
    assert!(said(&output).contains("wal_level = logical"), "{}", said(&output));

    let output = Postrider::on_database("cells list --json", &pair.home).output();
    let listed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let cells = listed["cells"].as_array().expect("a list");
    let line = |cell: &Value| {
        format!(
            "{} {} {} {}",
            cell["id"], cell["name"], cell["directory"], cell["database"]
        )
    };
    let lines: Vec<String> = cells.iter().map(line).collect();
    assert_eq!(
        lines,
        [
            "0 \"home\" \"here\" \"here\"",
            "1 \"a\" \"up to date\" \"1 dispatcher\"",
            "2 \"b\" \"up to date\" \"no dispatcher is running\"",
        ]
    );
    assert_eq!(cells[1]["tenants"], 1);
    let output = Postrider::on_database("cells list", &pair.home).output();
    assert!(
        said(&output).contains("no dispatcher is running"),
        "{}",
        said(&output)
    );
    let urls = "select string_agg(encode(url, 'escape'), ' ') from postrider.cells";
    assert!(
        !pair.home.text(urls).await.contains("postgresql"),
        "they are encrypted"
    );

    // A slot that is gone took changes with it: it is not replaced by a new one.
    third
        .execute_here_as_superuser("alter subscription postrider_home disable")
        .await;
    until("the slot is dropped", || async {
        let drop = "select count(pg_drop_replication_slot(slot_name)) from pg_replication_slots
                    where slot_name like '%cell_2' and not active";
        (pair.home.count(drop).await == 1).then_some(())
    })
    .await;
    let output = add("cells add b", &pair.home, &third).output();
    assert!(
        said(&output).contains("replication slot is lost"),
        "{}",
        said(&output)
    );
    let output = Postrider::on_database("doctor", &pair.home).output();
    assert!(
        said(&output).contains("the replication slot is gone"),
        "{}",
        said(&output)
    );
    third
        .execute_here_as_superuser(&in_docs("alter subscription postrider_home disable;"))
        .await;
    let output = add("cells add b", &pair.home, &third).output();
    assert!(output.status.success(), "{}", said(&output));
    let tenants = "select count(*) from postrider.tenants";
    assert_eq!(third.count(tenants).await, pair.home.count(tenants).await);

    // The API belongs to home.
    let output = Postrider::on_database("dashboard", &pair.cell).output();
    assert!(
        said(&output).contains("only dispatchers run on it"),
        "{}",
        said(&output)
    );
    for (database, home, expected) in [
        (&pair.home, None, "2 cells follow the directory"),
        (&pair.home, None, "no event waits for more than a minute"),
        (&pair.cell, Some(&pair.home), "follows the home database"),
        (&pair.cell, Some(&pair.home), "it knows this database as cell 1"),
        (&pair.cell, None, "POSTRIDER_HOME_DATABASE_URL is not set here"),
        (&pair.cell, Some(&lone), "is not home"),
    ] {
        let mut launch = Postrider::on_database("doctor", database);
        if let Some(home) = home {
            launch = launch.set("POSTRIDER_HOME_DATABASE_URL", home.url());
        }
        let output = launch.output();
        assert!(said(&output).contains(expected), "{expected}: {}", said(&output));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_at_home_is_noticed_by_the_cell() {
    let pair = Pair::start().await;
    let receiver = Receiver::start().await;
    endpoint(&pair.cell, "acme", &receiver.url("/hook")).await;
    let mut producer = pair.home.connect().await;
    emit(&mut producer, "acme", "{}", None, None)
        .await
        .expect("emitted");
    receiver.wait_for(1).await;
    let stamp = "select max(xid)::text::bigint from postrider.endpoints";
    let before = pair.cell.count(stamp).await;
    let pause = |pause: &str| {
        AssertSqlSafe(format!(
            "update postrider.tenants set paused_at = {pause} where slug = 'acme'"
        ))
    };
    sqlx::raw_sql(pause("now()"))
        .execute(&mut producer)
        .await
        .expect("paused");
    until("the cell's endpoints were stamped", || async {
        (pair.cell.count(stamp).await > before).then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    emit(&mut producer, "acme", "{}", None, None)
        .await
        .expect("emitted");
    pair.drained().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(receiver.received().len(), 1, "it is paused");
    sqlx::raw_sql(pause("null"))
        .execute(&mut producer)
        .await
        .expect("resumed");
    receiver.wait_for(2).await;
}
