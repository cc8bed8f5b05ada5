//! What belongs to a tenant, in the order in which it is copied, with the statement that reads the next rows of each table.
//! Rows travel as JSON by column name, and keep their ids: those of different cells never collide.

use sqlx::{AssertSqlSafe, FromRow, PgConnection};

use postrider_proto::TenantId;

use crate::bind::BindAll;

/// Rows, or endpoints where whole endpoints are read, of one step.
const STEP: i64 = 1_000;
const ENDPOINTS_STEP: i64 = 20;
/// With a row for every minute of two days, or every hour of months.
const STATISTICS_STEP: i64 = 1;
const NO_EVENT: &str = "00000000-0000-0000-0000-000000000000";

/// How the rows of a table are found.
#[derive(Debug, Clone, Copy)]
enum By {
    /// All at once: few.
    Tenant,
    /// By a text that follows the tenant in an index.
    TenantAnd(&'static str),
    /// All rows of some endpoints, of so many at once.
    Endpoint(i64),
    /// By endpoint and event.
    Delivery,
    Statement(&'static str),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) table: &'static str,
    by: By,
    /// Where reading begins.
    first: &'static str,
}

const fn part(table: &'static str, by: By, first: &'static str) -> Part {
    Part { table, by, first }
}

/// What waits to be sent comes last: when it is there, everything that it needs is there.
pub(super) const PARTS: [Part; 27] = [
    part("endpoints", By::Statement(include_str!("sql/endpoints.sql")), "0"),
    part("secrets", By::Endpoint(ENDPOINTS_STEP), "0"),
    part("planned_rotations", By::Endpoint(ENDPOINTS_STEP), "0"),
    part("endpoint_health", By::Endpoint(ENDPOINTS_STEP), "0"),
    part("endpoints_to_disable", By::Endpoint(ENDPOINTS_STEP), "0"),
    part("alerts", By::Endpoint(ENDPOINTS_STEP), "0"),
    part("trials", By::Endpoint(ENDPOINTS_STEP), "0"),
    part("notices", By::Endpoint(ENDPOINTS_STEP), "0"),
    part("minute_statistics", By::Endpoint(STATISTICS_STEP), "0"),
    part("hour_statistics", By::Endpoint(STATISTICS_STEP), "0"),
    part("tenant_usage", By::Tenant, ""),
    part(
        "idempotency",
        By::Statement(include_str!("sql/idempotency.sql")),
        "",
    ),
    part("ordering_keys", By::TenantAnd("key"), ""),
    part("event_ids", By::TenantAnd("id"), ""),
    part("events", By::Statement(include_str!("sql/events.sql")), NO_EVENT),
    part(
        "attempts",
        By::Statement(include_str!("sql/attempts.sql")),
        "00000000-0000-0000-0000-000000000000 0 0",
    ),
    part("traces", By::Statement(include_str!("sql/traces.sql")), NO_EVENT),
    part(
        "archived_events",
        By::Statement(include_str!("sql/archived_events.sql")),
        NO_EVENT,
    ),
    part(
        "archived_attempts",
        By::Statement(include_str!("sql/archived_attempts.sql")),
        "00000000-0000-0000-0000-000000000000 0 0",
    ),
    part(
        "traces",
        By::Statement(include_str!("sql/archived_traces.sql")),
        NO_EVENT,
    ),
    part("dead_letter_counts", By::Tenant, ""),
    part(
        "dead_letters",
        By::Delivery,
        "0 00000000-0000-0000-0000-000000000000",
    ),
    part("replays", By::Tenant, ""),
    part(
        "replay_parts",
        By::Statement(include_str!("sql/replay_parts.sql")),
        "0",
    ),
    part("listeners", By::Endpoint(ENDPOINTS_STEP), "0"),
    part("retries", By::Delivery, "0 00000000-0000-0000-0000-000000000000"),
    part("queue", By::Delivery, "0 00000000-0000-0000-0000-000000000000"),
];

/// Some rows of a table.
#[derive(Debug, FromRow)]
pub(super) struct Rows {
    /// A JSON array.
    pub(super) rows: String,
    /// Where the next ones are. Null: there are no more.
    pub(super) last: Option<String>,
    pub(super) count: i64,
}

impl Part {
    /// The rows after `after`.
    pub(super) async fn read(
        &self,
        source: &mut PgConnection,
        tenant: TenantId,
        after: Option<&str>,
    ) -> Result<Rows, sqlx::Error> {
        let limit = match self.by {
            By::Endpoint(limit) => limit,
            _ => STEP,
        };
        sqlx::query_as(AssertSqlSafe(self.statement()))
            .bind_all((tenant, after.unwrap_or(self.first), limit))
            .fetch_one(source)
            .await
    }

    /// Built only from the names in `PARTS`.
    fn statement(&self) -> String {
        let table = self.table;
        match self.by {
            By::Statement(statement) => statement.to_owned(),
            By::Tenant => format!(
                "select coalesce(json_agg(t), '[]')::text as rows, null::text as last, count(*) as count
                 from postrider.{table} t where t.tenant_id = $1 and $2 = '' and $3 > 0"
            ),
            By::TenantAnd(column) => format!(
                "with taken as (
                     select t.* from postrider.{table} t where t.tenant_id = $1 and t.{column} > $2
                     order by t.{column} limit $3
                 )
                 select coalesce(json_agg(t), '[]')::text as rows,
                        (select l.{column} from taken l order by l.{column} desc limit 1) as last, count(*) as count
                 from taken t"
            ),
            By::Endpoint(_) => format!(
                "with endpoint as materialized (
                     select e.id from postrider.endpoints e where e.tenant_id = $1 and e.id > $2::int order by e.id limit $3
                 ),
                 taken as (select t.* from endpoint e join postrider.{table} t on t.endpoint_id = e.id)
                 select coalesce(json_agg(t), '[]')::text as rows, (select max(e.id)::text from endpoint e) as last,
                        count(*) as count
                 from taken t"
            ),
            By::Delivery => format!(
                "with after as (select split_part($2, ' ', 1)::int as endpoint, split_part($2, ' ', 2)::uuid as event),
                 taken as (
                     select t.* from postrider.endpoints e
                     cross join after
                     cross join lateral (
                         select t.* from postrider.{table} t
                         where t.endpoint_id = e.id and (e.id > after.endpoint or t.event_id > after.event)
                         order by t.event_id limit $3
                     ) t
                     where e.tenant_id = $1 and e.id >= after.endpoint
                     order by t.endpoint_id, t.event_id limit $3
                 )
                 select coalesce(json_agg(t), '[]')::text as rows,
                        (select concat_ws(' ', l.endpoint_id, l.event_id) from taken l
                         order by l.endpoint_id desc, l.event_id desc limit 1) as last,
                        count(*) as count
                 from taken t"
            ),
        }
    }
}

/// Writes the rows. Those that are there already stay as they are: a step may be repeated.
pub(super) async fn write(
    target: &mut PgConnection,
    table: &'static str,
    rows: &str,
) -> Result<u64, sqlx::Error> {
    let columns = columns(target, table).await?;
    let insert = format!(
        "insert into postrider.{table} ({columns}) overriding system value
         select {columns} from json_populate_recordset(null::postrider.{table}, $1::json)
         on conflict do nothing"
    );
    let done = sqlx::query(AssertSqlSafe(insert))
        .bind(rows)
        .execute(target)
        .await?;
    Ok(done.rows_affected())
}

/// All that a row has of its own. Ids of transactions mean nothing in another database.
async fn columns(db: &mut PgConnection, table: &'static str) -> Result<String, sqlx::Error> {
    sqlx::query_scalar(
        "select string_agg(quote_ident(a.attname), ', ' order by a.attnum)
         from pg_attribute a
         where a.attrelid = ('postrider.' || $1)::regclass and a.attnum > 0 and not a.attisdropped
           and a.attgenerated = '' and a.atttypid <> 'xid8'::regtype",
    )
    .bind(table)
    .fetch_one(db)
    .await
}
