//! The log filter of all processes, changed while they run.

use axum::{Extension, Json, extract::State};
use postrider_proto::{api::LogFilter, limits::DESCRIPTION_BYTES_MAX};
use serde_json::json;

use super::ApiResult;
use crate::{
    Shared,
    auth::{Actor, Rule::Admin},
    http::{input::Body, problem::Problem},
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
    let mut transaction = tables::begin(&app.pool).await?;
    log_filter::put(&mut *transaction, form.filter.as_deref(), &actor.name).await?;
    let entry =
        Entry::new(&actor, Action::LogFilterPut, None, "log_filter").with(json!({ "filter": form.filter }));
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(Json(form))
}
