//! The log filter of all processes, changed while they run.

use axum::{Extension, Json, extract::State};
use postrider_proto::{api::LogFilter, limits::DESCRIPTION_BYTES_MAX};
use serde_json::json;

use super::ApiResult;
use crate::{
    App, Shared,
    auth::{Actor, Rule::Admin},
    http::{
        cells::{ask, not_responding},
        input::Body,
        problem::Problem,
    },
    openapi::Operation,
    tables::{
        self,
        audit::{self, Action, Entry},
        log_filter,
    },
};

const LOG_FILTER: &str = "/v1/log-filter";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(Admin, LOG_FILTER, get)
            .named("getLogFilter", "Retrieve the log filter")
            .returns::<LogFilter>(200, "The log filter."),
        Operation::put(Admin, LOG_FILTER, put)
            .named("putLogFilter", "Change the log filter of all processes")
            .describe(
                "Takes effect within seconds, also in processes that start later, until it is set to null.",
            )
            .accepts::<LogFilter>()
            .returns::<LogFilter>(200, "The log filter."),
    ]
}

async fn get(State(app): State<Shared>) -> ApiResult<LogFilter> {
    let filter = log_filter::find(&app.pool).await?;
    Ok(Json(LogFilter { filter }))
}

async fn put(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Body(form): Body<LogFilter>,
) -> ApiResult<LogFilter> {
    if let Some(filter) = &form.filter {
        if filter.len() > DESCRIPTION_BYTES_MAX || filter.contains('\0') {
            let requirement = format!("must be at most {DESCRIPTION_BYTES_MAX} bytes of text");
            return Err(Problem::invalid("/filter", requirement));
        }
        (app.check_log_filter)(filter).map_err(|why| Problem::invalid("/filter", why))?;
    }
    let wanted = form.filter.clone();
    let answers = ask(&app, move |app| {
        let (filter, actor) = (wanted.clone(), actor.clone());
        async move { put_in(&app, &actor, filter.as_deref()).await }
    })
    .await?;
    match answers.silent.is_empty() {
        true => Ok(Json(form)),
        false => Err(not_responding(&answers.silent)),
    }
}

async fn put_in(app: &App, actor: &Actor, filter: Option<&str>) -> Result<(), Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    log_filter::put(&mut *transaction, filter, &actor.name).await?;
    let entry = Entry::new(actor, Action::LogFilterPut, None, "log_filter").with(json!({ "filter": filter }));
    audit::write(&mut transaction, entry).await?;
    Ok(transaction.commit().await?)
}
