//! The catalogue: event types, their versions, each schema as a table, what differs between two, and an example body.
//! The same for the team and for customers: it is the same for all tenants.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::{Path, State},
};
use postrider_proto::{TypeId, routing::is_type_name};
use postrider_sender::Schema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Frame, Moment, PageProblem};
use crate::{
    Shared,
    api::compatibility::{Break, compare},
    auth::Session,
    input::Query,
    listing,
    problem::Problem,
    schema_table::{Difference, Field, differences, example, fields},
    tables::{
        event_types::{self, EventTypeRow},
        schemas,
    },
};

const LINES: i64 = 100;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct TypesQuery {
    cursor: Option<String>,
}

struct Line {
    row: EventTypeRow,
    versions: Vec<String>,
}

#[derive(Template, WebTemplate)]
#[template(path = "event_types.html")]
pub(crate) struct TypesPage {
    frame: Frame,
    lines: Vec<Line>,
    next: Option<String>,
}

pub(crate) async fn list(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Query(query): Query<TypesQuery>,
) -> Result<TypesPage, PageProblem> {
    let after = query
        .cursor
        .as_deref()
        .map(listing::decode::<String>)
        .transpose()?;
    let rows = event_types::list(&app.pool, &after.unwrap_or_default(), LINES + 1).await?;
    let page = listing::Page::cut(rows, LINES, |row| row.name.clone());
    let ids: Vec<TypeId> = page.data.iter().map(|row| row.id).collect();
    let versions = schemas::versions(&app.pool, &ids).await?;
    let of = |id: TypeId| versions.iter().filter(move |(of, _)| *of == id);
    Ok(TypesPage {
        frame: Frame::new(session, "event-types"),
        lines: page
            .data
            .into_iter()
            .map(|row| Line {
                versions: of(row.id).rev().map(|(_, version)| version.clone()).collect(),
                row,
            })
            .collect(),
        next: page.next_cursor,
    })
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct TypeQuery {
    version: String,
    /// The version it is compared with.
    against: String,
}

#[derive(Template, WebTemplate)]
#[template(path = "event_type.html")]
pub(crate) struct TypePage {
    frame: Frame,
    name: String,
    description: String,
    thin: bool,
    created: Moment,
    /// The newest first.
    versions: Vec<String>,
    version: String,
    against: Option<String>,
    fields: Vec<Field>,
    raw: String,
    differences: Vec<Difference>,
    breaks: Vec<Break>,
    example: String,
    /// Whether the example passes the schema's own check.
    example_fits: bool,
}

pub(crate) async fn show(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Path(name): Path<String>,
    Query(query): Query<TypeQuery>,
) -> Result<TypePage, PageProblem> {
    let row = match is_type_name(&name) {
        true => event_types::find(&app.pool, &name).await?,
        false => None,
    };
    let row = row.ok_or_else(|| Problem::not_found("event type"))?;
    let published: Vec<(String, Value)> = schemas::of_type(&app.pool, row.id)
        .await?
        .into_iter()
        .rev()
        .map(|schema| {
            let value = serde_json::from_str(schema.schema.get()).unwrap_or(Value::Bool(true));
            (schema.version, value)
        })
        .collect();
    let missing = || Problem::not_found("version");
    let at = match query.version.as_str() {
        "" => 0,
        wanted => published
            .iter()
            .position(|(version, _)| version == wanted)
            .ok_or_else(missing)?,
    };
    let (version, schema) = published.get(at).ok_or_else(missing)?;
    // Without a choice: the one before it.
    let against = match query.against.as_str() {
        "" => published.get(at + 1),
        wanted => Some(
            published
                .iter()
                .find(|(version, _)| version == wanted)
                .ok_or_else(missing)?,
        ),
    };
    let own = fields(schema);
    let data = example(schema);
    let fits =
        Schema::compile(schema).is_ok_and(|compiled| compiled.violations(&data.to_string()).is_empty());
    let body = json!({
        "id": "evt_00000000000000000000000000", "type": row.name, "created_at": "2026-01-15T09:30:00.000Z",
        "api_version": version, "data": data,
    });
    Ok(TypePage {
        frame: Frame::new(session, "event-types"),
        differences: against.map_or(Vec::new(), |(_, old)| differences(&fields(old), &own)),
        breaks: against.map_or(Vec::new(), |(_, old)| compare(old, schema)),
        against: against.map(|(version, _)| version.clone()),
        versions: published.iter().map(|(version, _)| version.clone()).collect(),
        version: version.clone(),
        raw: pretty(schema),
        example: pretty(&body),
        example_fits: fits,
        fields: own,
        name: row.name,
        description: row.description.unwrap_or_default(),
        thin: row.thin,
        created: Moment(Some(row.created_at)),
    })
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}
