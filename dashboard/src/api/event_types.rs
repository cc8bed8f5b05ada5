//! Event types and their versioned schemas.

use std::collections::BTreeMap;

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use postrider_proto::{
    TypeId,
    api::{EventType, EventTypeSettings},
};

use super::ApiResult;
use crate::{
    Shared,
    actions::event_types,
    auth::{
        Actor,
        Rule::{Admin, Catalogue},
    },
    http::{
        input::{Query, Text},
        pagination::{Page, PageQuery, cut},
        problem::Problem,
    },
    openapi::Operation,
    tables::{event_types as table, schemas},
};

const TYPE_BODY_BYTES_MAX: usize = 1024 * 1024;
const TYPE: &str = "/v1/event-types/{type}";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Catalogue, "/v1/event-types", list)
            .named("listEventTypes", "List event types")
            .returns_page::<EventType>("A page of event types, ordered by name, without their schemas."),
        Operation::put(Admin, TYPE, put)
            .named("putEventType", "Create an event type or add versions")
            .describe(
                "A published version's schema can't be changed: a different one is a 409 `schema-version-published`. \
                 Versions, `thin` and `description` are kept if omitted; a `description` of null is removed. Names \
                 starting with `postrider.` are reserved.",
            )
            .accepts::<EventTypeSettings>()
            .returns::<EventType>(201, "The event type was created.")
            .returns::<EventType>(
                200,
                "The event type was updated. `compatibility` lists what the new versions break for consumers.",
            )
            .fails_with(&[409]),
        Operation::get(Catalogue, TYPE, get)
            .named("getEventType", "Retrieve an event type")
            .returns::<EventType>(200, "The event type with its schemas."),
        Operation::delete(Admin, TYPE, delete)
            .named("deleteEventType", "Delete an event type")
            .describe("Existing events of this type are kept and delivered; new ones are rejected.")
            .returns_nothing("The event type was deleted.")
            .fails_with(&[422]),
    ]
}

async fn put(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(name): Path<String>,
    text: Text<TYPE_BODY_BYTES_MAX>,
) -> Result<Response, Problem> {
    event_types::check_name(&name)?;
    let form: EventTypeSettings = text.read_once()?;
    let (view, is_new) = event_types::put(&app, &actor, &name, &form).await?;
    let status = if is_new {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(view)).into_response())
}

async fn get(State(app): State<Shared>, Path(name): Path<String>) -> ApiResult<EventType> {
    event_types::find(&app, &name).await.map(Json)
}

async fn delete(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(name): Path<String>,
) -> Result<StatusCode, Problem> {
    event_types::delete(&app, &actor, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Without the schemas: a page of them could be very large.
async fn list(State(app): State<Shared>, Query(query): Query<PageQuery>) -> ApiResult<Page<EventType>> {
    let (limit, after) = (query.limit()?, query.after::<String>()?.unwrap_or_default());
    let rows = table::list(&app.pool, &after, limit + 1).await?;
    let page = cut(rows, limit, |row| row.name.clone());
    let ids: Vec<TypeId> = page.data.iter().map(|row| row.id).collect();
    let mut versions: BTreeMap<i32, Vec<String>> = BTreeMap::new();
    for (id, version) in schemas::versions(&app.pool, &ids).await? {
        versions.entry(id.0).or_default().push(version);
    }
    Ok(Json(page.map(|row| EventType {
        versions: versions.remove(&row.id.0).unwrap_or_default(),
        r#type: row.name,
        description: row.description,
        thin: row.thin,
        schemas: None,
        created_at: row.created_at,
        compatibility: Vec::new(),
    })))
}
