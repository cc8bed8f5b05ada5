//! The event type catalogue: versions, schemas as tables, changes between versions and an example body. The team and
//! customers see the same pages, because event types are shared by all tenants.

use askama::Template;
use askama_web::WebTemplate;
use axum::{extract::Path, response::Redirect};
use postrider_proto::{
    TypeId,
    api::Break,
    routing::{RESERVED_PREFIX, is_type_name},
};
use postrider_sender::{approximate_sample, sample};
use serde::Deserialize;
use serde_json::Value;

use super::{Frame, Moment, Paged, Pretty};
use crate::{
    actions::compatibility::compare,
    actions::trials::event::{compose, thin},
    auth::{Confirmed, Visit},
    http::{input::Query, pagination, problem::Problem},
    pages::schema_table::{Difference, Field, differences, fields},
    tables::{
        event_types::{self, EventTypeRow},
        schemas::{self, SchemaRow},
    },
};

const EXAMPLE_ID: &str = "evt_018cc251f40070008000000000000001";
const LINES: i64 = 100;
const DONE: [(&str, &str); 1] = [("published", "Version published.")];
const LIST_DONE: [(&str, &str); 1] = [(
    "deleted",
    "Event type deleted. New events of this type are rejected.",
)];

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct TypesQuery {
    cursor: Option<String>,
    done: String,
}

struct TypeSummary {
    row: EventTypeRow,
    versions: Vec<String>,
}

#[derive(Template, WebTemplate)]
#[template(path = "event_types.html")]
pub(crate) struct TypesPage {
    frame: Frame,
    lines: Vec<TypeSummary>,
    next: Option<String>,
}

pub(crate) async fn list(visit: Visit, Query(query): Query<TypesQuery>) -> Paged<TypesPage> {
    let after: Option<String> = pagination::after(query.cursor.as_deref())?;
    let rows = event_types::list(&visit.app.pool, &after.unwrap_or_default(), LINES + 1).await?;
    let page = pagination::cut(rows, LINES, |row| row.name.clone());
    let ids: Vec<TypeId> = page.data.iter().map(|row| row.id).collect();
    let versions = schemas::versions(&visit.app.pool, &ids).await?;
    let of = |id: TypeId| versions.iter().filter(move |(of, _)| *of == id);
    Ok(TypesPage {
        frame: Frame::new(visit.session, "event-types").with_done(&query.done, &LIST_DONE),
        lines: page
            .data
            .into_iter()
            .map(|row| TypeSummary {
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
    /// The version to compare with.
    against: String,
    done: String,
}

#[derive(Template, WebTemplate)]
#[template(path = "event_type.html")]
pub(crate) struct TypePage {
    frame: Frame,
    /// The type may get a new version or be deleted: it is not one of Postrider's own.
    may_publish: bool,
    name: String,
    description: String,
    thin: bool,
    /// When the version shown was published.
    published: Moment,
    /// Newest first.
    versions: Vec<String>,
    version: String,
    against: Option<String>,
    fields: Vec<Field>,
    raw: String,
    differences: Vec<Difference>,
    breaks: Vec<Break>,
    example: String,
    /// Whether the example is valid against the schema.
    example_fits: bool,
}

pub(crate) async fn show(
    visit: Visit,
    Path(name): Path<String>,
    Query(query): Query<TypeQuery>,
) -> Paged<TypePage> {
    let row = match is_type_name(&name) {
        true => event_types::find(&visit.app.pool, &name).await?,
        false => None,
    };
    let row = row.ok_or_else(|| Problem::not_found("event type"))?;
    let mut published = schemas::of_type(&visit.app.pool, row.id).await?;
    published.reverse();
    let missing = || Problem::not_found("version");
    let at = match query.version.as_str() {
        "" => 0,
        wanted => published
            .iter()
            .position(|one| one.version == wanted)
            .ok_or_else(missing)?,
    };
    let shown = published.get(at).ok_or_else(missing)?;
    // The default is the previous version.
    let against = match query.against.as_str() {
        "" => published.get(at + 1),
        wanted => Some(
            published
                .iter()
                .find(|one| one.version == wanted)
                .ok_or_else(missing)?,
        ),
    };
    let schema = value_of(shown);
    let old = against.map(value_of);
    let own = fields(&schema);
    // Falls back to an approximate example if no valid one can be generated.
    let (data, fits) = match sample(&schema) {
        Ok(data) => (data, true),
        Err(_) => (approximate_sample(&schema), false),
    };
    let data = if row.thin { thin(&data) } else { data };
    let body = compose(
        EXAMPLE_ID,
        &row.name,
        shown.created_at,
        &shown.version,
        None,
        &data,
    );
    let frame = Frame::new(visit.session, "event-types").with_done(&query.done, &DONE);
    Ok(TypePage {
        may_publish: frame.may_administer() && !row.name.starts_with(RESERVED_PREFIX),
        frame,
        differences: old
            .as_ref()
            .map_or(Vec::new(), |old| differences(&fields(old), &own)),
        breaks: old.as_ref().map_or(Vec::new(), |old| compare(old, &schema)),
        against: against.map(|one| one.version.clone()),
        versions: published.iter().map(|one| one.version.clone()).collect(),
        version: shown.version.clone(),
        raw: Pretty::whole(shown.schema.get()),
        example: Pretty::whole(&body),
        example_fits: fits,
        fields: own,
        name: row.name,
        description: row.description.unwrap_or_default(),
        thin: row.thin,
        published: Moment(Some(shown.created_at)),
    })
}

pub(crate) async fn delete(visit: Visit, Path(name): Path<String>, _: Confirmed) -> Paged<Redirect> {
    crate::actions::event_types::delete(&visit.app, &visit.actor, &name).await?;
    Ok(Redirect::to("/event-types?done=deleted"))
}

fn value_of(schema: &SchemaRow) -> Value {
    serde_json::from_str(schema.schema.get()).unwrap_or(Value::Bool(true))
}
