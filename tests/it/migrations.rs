//! The upgrade path: a database in use is migrated without blocking producers, and `migrate` can be run at any time.

use std::{
    borrow::Cow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use chrono::{TimeDelta, Utc};
use postrider_dispatcher::{
    partitions,
    schema::{self, BASELINE_VERSION, FunctionFile, OnlineIndex, SchemaError, SchemaSet},
};
use sqlx::{
    AssertSqlSafe, PgPool, SqlSafeStr,
    migrate::{Migration, MigrationType},
};
use tokio::task::JoinSet;

use crate::support::{Database, Postrider};

const MONTH: Duration = Duration::from_secs(30 * 86_400);
const ROWS: usize = 100_000;
const EMITTERS: usize = 4;
/// What an emit may take while the schema is migrated.
const EMIT_TIME_MAX: Duration = Duration::from_secs(1);
/// A transaction of a slow producer: longer than that.
const SLOW_PRODUCER: Duration = Duration::from_millis(1_500);

const ATTEMPTS_INDEX: OnlineIndex = OnlineIndex {
    table: "attempts",
    name: "attempts_started",
    definition: "(endpoint_id, started_at)",
};
const EVENTS_INDEX: OnlineIndex = OnlineIndex {
    table: "events",
    name: "events_type",
    definition: "(type_id, id) where sequence is null",
};
const QUEUE_INDEX: OnlineIndex = OnlineIndex {
    table: "queue",
    name: "queue_type",
    definition: "(type_id)",
};

/// The schema of the first release, with the functions as they were then.
fn first_release() -> SchemaSet {
    let mut set = SchemaSet::main();
    set.migrations.retain(|one| one.version <= BASELINE_VERSION);
    set.functions = [
        ("event_ids", include_str!("first_release/event_ids.sql")),
        ("emit", include_str!("first_release/emit.sql")),
        ("notices", include_str!("first_release/notices.sql")),
        ("changes", include_str!("first_release/changes.sql")),
    ]
    .map(|(name, sql)| FunctionFile {
        name,
        sql: Cow::Borrowed(sql),
    })
    .into();
    set.indexes.clear();
    set.oldest_compatible = 0;
    set.release = vec![0];
    set
}

/// The schema of this release, without indexes that are built online.
fn baseline() -> SchemaSet {
    let mut set = SchemaSet::main();
    set.indexes.clear();
    set
}

/// A later release: another column on the two busiest tables, a changed function, indexes on large tables.
fn follow_up() -> SchemaSet {
    let mut set = SchemaSet::main();
    let sql = "alter table postrider.queue add column note text;
               alter table postrider.events add column note text";
    set.migrations.push(Migration::new(
        900_001,
        "notes".into(),
        MigrationType::Simple,
        sql.into_sql_str(),
        false,
    ));
    replace(
        &mut set,
        "emit",
        "'tenant %L not found'",
        "'tenant %L does not exist'",
    );
    set.indexes.extend([ATTEMPTS_INDEX, EVENTS_INDEX, QUEUE_INDEX]);
    set
}

fn replace(set: &mut SchemaSet, file: &str, from: &str, to: &str) {
    let file = set.functions.iter_mut().find(|one| one.name == file);
    let file = file.expect("a file of functions");
    assert!(file.sql.contains(from), "{from}");
    file.sql = Cow::Owned(file.sql.replace(from, to));
}

async fn pool_of(database: &Database) -> PgPool {
    PgPool::connect_with(database.options()).await.expect("connected")
}

async fn migrated(set: &SchemaSet) -> (Database, PgPool) {
    let database = Database::empty().await;
    let pool = pool_of(&database).await;
    schema::migrate_to(&pool, set).await.expect("migrated");
    let past = Utc::now() - TimeDelta::days(3);
    partitions::make_ahead_at(&pool, MONTH, past)
        .await
        .expect("partitions created");
    (database, pool)
}

/// A tenant, a type, three endpoints, and rows in the partitions of four days.
async fn fill(database: &Database, rows: usize) {
    let statements = format!(
        "insert into postrider.tenants (slug) values ('acme');
         with made as (insert into postrider.event_types (name, matches) values ('a.b', '{{*}}') returning id)
         insert into postrider.schemas (type_id, version, schema) select id, '1', '{{}}' from made;
         insert into postrider.endpoints (public_id, tenant_id, shard, url)
         select 'ep_' || n, t.id, n, 'http://127.0.0.1:9/' from postrider.tenants t, generate_series(1, 3) n;
         create temp table made as
         select postrider.uuid_at(clock_timestamp() - n % 4 * interval '1 day') as id, t.id as tenant_id, s.type_id,
                s.id as schema_id, e.id as endpoint_id, e.shard
         from generate_series(1, {rows}) n, postrider.tenants t, postrider.schemas s, postrider.endpoints e
         where s.version = '1' and e.public_id = 'ep_1';
         insert into postrider.events (id, tenant_id, type_id, schema_id, body)
         select id, tenant_id, type_id, schema_id, '{{}}' from made;
         insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
         select endpoint_id, id, shard, tenant_id, type_id from made;
         insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms, outcome)
         select id, endpoint_id, 1, tenant_id, type_id, clock_timestamp(), 5, 0 from made;"
    );
    database.execute(&statements).await;
}

/// Emits until told to stop; returns the slowest emit and how many there were.
async fn emit_until(pool: PgPool, number: usize, stop: Arc<AtomicBool>) -> (Duration, usize) {
    let (mut slowest, mut count) = (Duration::ZERO, 0);
    let mut connection = pool.acquire().await.expect("connected");
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        sqlx::query("select postrider.emit('acme', 'a.b', '{}', $1, ordering_key => $2)")
            .bind(format!("e{number}-{count}"))
            .bind(format!("k{number}"))
            .execute(&mut *connection)
            .await
            .expect("emitted");
        slowest = slowest.max(began.elapsed());
        count += 1;
    }
    (slowest, count)
}

/// Leaves its transactions open for longer than an emit may take.
async fn emit_slowly_until(pool: PgPool, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        let mut transaction = pool.begin().await.expect("begun");
        sqlx::query("select postrider.emit('acme', 'a.b', '{}')")
            .execute(&mut *transaction)
            .await
            .expect("emitted");
        tokio::time::sleep(SLOW_PRODUCER).await;
        transaction.commit().await.expect("committed");
        tokio::time::sleep(SLOW_PRODUCER / 3).await;
    }
}

async fn assert_complete(database: &Database, index: &OnlineIndex) {
    let OnlineIndex { table, name, .. } = index;
    let invalid = format!(
        "select count(*) from pg_index i join pg_class c on c.oid = i.indrelid
         where not i.indisvalid and c.relnamespace = 'postrider'::regnamespace and c.relname like '{table}%'"
    );
    assert_eq!(database.count(&invalid).await, 0, "{name}");
    let valid = format!(
        "select count(*) from pg_index where indexrelid = to_regclass('postrider.{name}') and indisvalid"
    );
    assert_eq!(database.count(&valid).await, 1, "{name}");
    let without = format!(
        "select count(*) from pg_inherits t where t.inhparent = 'postrider.{table}'::regclass
         and not exists (select from pg_inherits i join pg_index x on x.indexrelid = i.inhrelid
                         where i.inhparent = 'postrider.{name}'::regclass and x.indrelid = t.inhrelid)"
    );
    assert_eq!(database.count(&without).await, 0, "{name}");
}

#[tokio::test]
async fn a_database_in_use_is_migrated_and_no_emit_waits_for_a_second() {
    let (database, pool) = migrated(&baseline()).await;
    fill(&database, ROWS).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut emitters = JoinSet::new();
    for number in 0..EMITTERS {
        emitters.spawn(emit_until(pool.clone(), number, stop.clone()));
    }
    let slow = tokio::spawn(emit_slowly_until(pool.clone(), stop.clone()));
    tokio::time::sleep(Duration::from_millis(500)).await;

    let migrating = pool_of(&database).await;
    schema::migrate_to(&migrating, &follow_up())
        .await
        .expect("migrated");

    stop.store(true, Ordering::Relaxed);
    slow.await.expect("the slow producer");
    for (slowest, count) in emitters.join_all().await {
        assert!(slowest < EMIT_TIME_MAX, "an emit took {slowest:?}");
        assert!(count > 10, "{count} emits");
    }
    let columns = "select count(*) from information_schema.columns
                   where table_schema = 'postrider' and table_name in ('queue', 'events') and column_name = 'note'";
    assert_eq!(database.count(columns).await, 2);
    let refused = sqlx::query("select postrider.emit('nobody', 'a.b', '{}')")
        .execute(&pool)
        .await
        .expect_err("there is no such tenant");
    assert!(refused.to_string().contains("does not exist"), "{refused}");
    for index in [ATTEMPTS_INDEX, EVENTS_INDEX, QUEUE_INDEX] {
        assert_complete(&database, &index).await;
    }
    let kept =
        "select count(*) from postrider.queue where event_id in (select event_id from postrider.attempts)";
    assert_eq!(database.count(kept).await, i64::try_from(ROWS).expect("a count"));
    // A program of the earlier release goes on with the newer schema, and changes nothing.
    schema::migrate_to(&migrating, &baseline())
        .await
        .expect("nothing to do");
    schema::check(&mut database.connect().await)
        .await
        .expect("a newer schema is fine");
}

#[tokio::test]
async fn the_schema_of_the_first_release_is_migrated_in_use_and_no_emit_waits_for_a_second() {
    let (database, pool) = migrated(&first_release()).await;
    fill(&database, ROWS).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut emitters = JoinSet::new();
    for number in 0..EMITTERS {
        emitters.spawn(emit_until(pool.clone(), number, stop.clone()));
    }
    let slow = tokio::spawn(emit_slowly_until(pool.clone(), stop.clone()));
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = database.count("select count(*) from postrider.events").await;

    let migrating = pool_of(&database).await;
    let report = schema::migrate(&migrating).await.expect("migrated");
    assert!(report.to_string().contains("migration 0009 quotas"), "{report}");
    tokio::time::sleep(Duration::from_millis(500)).await;

    stop.store(true, Ordering::Relaxed);
    slow.await.expect("the slow producer");
    let mut emitted = 0;
    for (slowest, count) in emitters.join_all().await {
        assert!(slowest < EMIT_TIME_MAX, "an emit took {slowest:?}");
        emitted += count;
    }
    let own = "select count(*) from postrider.events where chosen_id is not null";
    assert_eq!(
        database.count(own).await,
        i64::try_from(emitted).expect("a count")
    );
    assert!(database.count("select count(*) from postrider.events").await > before);
    let queued = "select count(*) from postrider.queue q join postrider.events e on e.id = q.event_id
                  where e.chosen_id is not null";
    assert_eq!(
        database.count(queued).await,
        3 * i64::try_from(emitted).expect("a count")
    );

    // What is new works, and a program of this release runs.
    database
        .execute("update postrider.tenants set emits_per_minute = 1, usage_since = clock_timestamp()")
        .await;
    let mut connection = pool.acquire().await.expect("connected");
    let mut refused = None;
    for _ in 0..3 {
        let emit = sqlx::query("select postrider.emit('acme', 'a.b', '{}')");
        refused = emit.execute(&mut *connection).await.err().or(refused);
    }
    assert!(refused.expect("over the quota").to_string().contains("quota"));
    let program = Postrider::start(&database).await;
    assert_eq!(program.api().get("/sending").await["stopped"], false);
}

/// Everything that a migration could have changed.
async fn state(database: &Database) -> String {
    database
        .text(
            "select md5(string_agg(line, ',' order by line)) from (
                 select p.oid || ' ' || p.xmin as line from pg_proc p where p.pronamespace = 'postrider'::regnamespace
                 union all
                 select c.oid || ' ' || c.relname from pg_class c where c.relnamespace = 'postrider'::regnamespace
                 union all
                 select f.file || ' ' || f.applied_at from postrider.function_versions f
                 union all
                 select m.version || ' ' || m.installed_on from postrider.schema_migrations m
             ) every",
        )
        .await
}

#[tokio::test]
async fn migrations_can_run_at_once_and_a_second_one_changes_nothing() {
    let database = Database::empty().await;
    let pools = [
        pool_of(&database).await,
        pool_of(&database).await,
        pool_of(&database).await,
    ];
    let [first, second, third] = pools.each_ref().map(schema::migrate);
    tokio::try_join!(first, second, third).expect("migrated");
    let before = state(&database).await;
    schema::migrate(&pool_of(&database).await)
        .await
        .expect("migrated");
    assert_eq!(state(&database).await, before);
}

#[tokio::test]
async fn a_function_that_was_edited_by_hand_is_restored() {
    let database = Database::fresh().await;
    let pool = pool_of(&database).await;
    let edited =
        "create or replace function postrider.uuid_time(id uuid) returns timestamptz language sql immutable
                  as 'select timestamptz ''epoch'''";
    let is_edited = "select count(*) from pg_proc where proname = 'uuid_time' and prosrc like '%select timestamptz ''epoch'''";
    database.execute(edited).await;
    assert_eq!(database.count(is_edited).await, 1);
    schema::migrate(&pool).await.expect("migrated");
    assert_eq!(database.count(is_edited).await, 0);
}

#[tokio::test]
async fn functions_of_a_later_release_are_not_replaced_by_an_earlier_one() {
    let database = Database::fresh().await;
    let pool = pool_of(&database).await;
    let mut later = SchemaSet::main();
    later.release = vec![900, 0, 0];
    replace(&mut later, "emit", "not found", "unknown");
    schema::migrate_to(&pool, &later).await.expect("migrated");
    schema::migrate(&pool).await.expect("nothing to do");
    let source = "select prosrc from pg_proc where oid = 'postrider.refuse'::regproc";
    assert!(database.text(source).await.contains("'tenant %L unknown'"));
    schema::check(&mut database.connect().await)
        .await
        .expect("later functions are fine");

    // Functions of an earlier one are out of date until they are migrated.
    database
        .execute("update postrider.function_versions set release = '{0}', checksum = ''")
        .await;
    let outdated = schema::check(&mut database.connect().await).await;
    assert!(matches!(outdated, Err(SchemaError::OlderFunctions)));
    schema::migrate(&pool).await.expect("migrated");
    assert!(database.text(source).await.contains("'tenant %L not found'"));
}

#[tokio::test]
async fn a_function_with_a_new_signature_keeps_its_grants() {
    let database = Database::fresh().await;
    let mut producer = database.producer().await;
    let mut set = SchemaSet::main();
    let drop = "drop function if exists postrider.emit(text, text, text, text, text, text, text, text);\n";
    replace(
        &mut set,
        "emit",
        "create or replace function postrider.emit(",
        &format!("{drop}create or replace function postrider.emit("),
    );
    replace(
        &mut set,
        "emit",
        "traceparent text default null, tracestate text default null\n",
        "traceparent text default null, tracestate text default null, tags text[] default null\n",
    );
    schema::migrate_to(&pool_of(&database).await, &set)
        .await
        .expect("migrated");
    fill(&database, 1).await;
    sqlx::query("select postrider.emit('acme', 'a.b', '{}', tags => '{vip}')")
        .execute(&mut producer)
        .await
        .expect("the producer may still emit");
    let public =
        "select count(*) from pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
                  where p.pronamespace = 'postrider'::regnamespace and a.grantee = 0";
    assert_eq!(database.count(public).await, 0);
}

#[tokio::test]
async fn an_interrupted_index_build_is_resumed() {
    let (database, pool) = migrated(&baseline()).await;
    fill(&database, 1_000).await;
    let today = Utc::now().format("%Y%m%d");
    database
        .execute("create index attempts_started on only postrider.attempts (endpoint_id, started_at)")
        .await;
    // A build that fails leaves an invalid index behind, as one that was killed does.
    let failed = format!(
        "create unique index concurrently attempts_{today}_started on postrider.attempts_{today} (tenant_id)"
    );
    sqlx::query(AssertSqlSafe(failed))
        .execute(&pool)
        .await
        .expect_err("not unique");
    let yesterday = (Utc::now() - TimeDelta::days(1)).format("%Y%m%d");
    database
        .execute(&format!(
            "create index attempts_{yesterday}_started on postrider.attempts_{yesterday} (endpoint_id, started_at)"
        ))
        .await;
    let mut set = baseline();
    set.indexes = vec![ATTEMPTS_INDEX];
    schema::migrate_to(&pool, &set).await.expect("migrated");
    assert_complete(&database, &ATTEMPTS_INDEX).await;
}

#[tokio::test]
async fn an_index_is_completed_when_the_last_partition_without_it_was_dropped() {
    let (database, pool) = migrated(&baseline()).await;
    let mut set = baseline();
    set.indexes = vec![ATTEMPTS_INDEX];
    schema::migrate_to(&pool, &set).await.expect("migrated");
    let past = (Utc::now() - TimeDelta::days(3)).format("%Y%m%d");
    database
        .execute(&format!(
            "drop index postrider.attempts_started;
             create index attempts_started on only postrider.attempts (endpoint_id, started_at);
             do $$
             declare
                 p regclass;
                 i text;
             begin
                 for p in select inhrelid from pg_inherits where inhparent = 'postrider.attempts'::regclass loop
                     i := replace(p::text, 'postrider.', '') || '_started';
                     if p <> 'postrider.attempts_{past}'::regclass then
                         execute format('create index %s on %s (endpoint_id, started_at)', i, p);
                         execute format('alter index postrider.attempts_started attach partition postrider.%s', i);
                     end if;
                 end loop;
             end $$;
             drop table postrider.attempts_{past}"
        ))
        .await;
    schema::migrate_to(&pool, &set).await.expect("migrated");
    assert_complete(&database, &ATTEMPTS_INDEX).await;
}

#[tokio::test]
async fn a_database_of_a_pre_release_build_is_refused() {
    let database = Database::empty().await;
    database
        .execute(
            "create schema postrider;
             create table postrider.schema_migrations (version bigint primary key, description text not null,
                 installed_on timestamptz not null default now(), success boolean not null, checksum bytea not null,
                 execution_time bigint not null);
             insert into postrider.schema_migrations (version, description, success, checksum, execution_time)
             values (1, 'create tables', true, '\\x00', 1), (260, 'settle repeated answers', true, '\\x00', 1)",
        )
        .await;
    let refused = schema::migrate(&pool_of(&database).await).await;
    let refused = refused.expect_err("no way from there");
    assert!(matches!(refused, SchemaError::PreRelease));
    assert!(refused.to_string().contains("pre-release build"), "{refused}");
    let checked = schema::check(&mut database.connect().await).await;
    assert!(matches!(checked, Err(SchemaError::PreRelease)));
}

#[tokio::test]
async fn the_tables_of_the_first_release_are_migrated_and_the_report_names_what_was_applied() {
    let database = Database::empty().await;
    let pool = pool_of(&database).await;
    database
        .execute(
            "create schema postrider;
             create table postrider.schema_migrations (version bigint primary key, description text not null,
                 installed_on timestamptz not null default now(), success boolean not null, checksum bytea not null,
                 execution_time bigint not null)",
        )
        .await;
    let first = SchemaSet::main().migrations.into_iter();
    for migration in first.filter(|one| one.version <= BASELINE_VERSION) {
        sqlx::raw_sql(migration.sql.clone())
            .execute(&pool)
            .await
            .expect("applied");
        sqlx::query(
            "insert into postrider.schema_migrations (version, description, success, checksum, execution_time)
             values ($1, $2, true, $3, 1)",
        )
        .bind(migration.version)
        .bind(migration.description.as_ref())
        .bind(migration.checksum.as_ref())
        .execute(&pool)
        .await
        .expect("recorded");
    }
    let mut connection = database.connect().await;
    let pending = schema::pending(&mut connection).await.expect("asked");
    let numbers: Vec<i64> = pending.migrations.iter().map(|(number, _)| *number).collect();
    assert!(numbers.starts_with(&[8, 9]), "{pending}");
    let applied = schema::migrate(&pool).await.expect("migrated");
    assert_eq!(applied, pending);
    assert!(
        applied.to_string().starts_with("migration 0008 switches, "),
        "{applied}"
    );
    assert!(schema::pending(&mut connection).await.expect("asked").is_empty());
    let past = Utc::now() - TimeDelta::days(3);
    partitions::make_ahead_at(&pool, MONTH, past)
        .await
        .expect("partitions created");
    fill(&database, 10).await;
    sqlx::query("select postrider.emit('acme', 'a.b', '{}')")
        .execute(&pool)
        .await
        .expect("emitted");
}

/// What a later release leaves behind.
async fn migrate_to_a_later_release(database: &Database, oldest_compatible: i64) {
    let mut later = follow_up();
    later.oldest_compatible = oldest_compatible;
    schema::migrate_to(&pool_of(database).await, &later)
        .await
        .expect("migrated");
}

#[tokio::test]
async fn migrate_of_an_earlier_release_succeeds_on_a_compatible_schema_and_warns() {
    let database = Database::fresh().await;
    migrate_to_a_later_release(&database, BASELINE_VERSION).await;
    let before = state(&database).await;
    let output = Postrider::on_database("migrate", &database).output();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert!(
        told.contains("newer than this program and compatible with it"),
        "{told}"
    );
    assert_eq!(state(&database).await, before);
    let mut program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    assert!(program.stop().await.success());
}

#[tokio::test]
async fn a_program_is_refused_by_a_schema_that_has_dropped_what_it_needs() {
    let database = Database::fresh().await;
    migrate_to_a_later_release(&database, 900_001).await;
    for role in ["migrate", "migrate --check", "dispatcher"] {
        let output = Postrider::on_database(role, &database).output();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{role}: {told}");
        let sentence = "needs a program that knows version 900001 or later";
        assert!(told.contains(sentence), "{role}: {told}");
    }
}

#[tokio::test]
async fn migrate_check_says_what_would_be_applied_and_changes_nothing() {
    let database = Database::fresh().await;
    let check = |database| Postrider::on_database("migrate --check", database).output();
    let output = check(&database);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        "Nothing to apply."
    );
    let edit =
        "create or replace function postrider.uuid_time(id uuid) returns timestamptz language sql immutable
                as 'select timestamptz ''epoch'''";
    database.execute(edit).await;
    let before = state(&database).await;
    let output = check(&database);
    assert_eq!(output.status.code(), Some(3));
    let told = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert_eq!(told, "To apply: functions event_ids");
    assert_eq!(state(&database).await, before);
    let output = Postrider::on_database("migrate", &database).output();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && told.contains("functions event_ids"),
        "{told}"
    );
    let output = check(&Database::empty().await);
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(3), "{told}");
    assert!(told.starts_with("To apply: migration 0001 "), "{told}");
}
