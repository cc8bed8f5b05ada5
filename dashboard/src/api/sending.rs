//! The switch that stops all sending.

use axum::{Extension, Json, extract::State};
use postrider_dispatcher::sending::{self, SendingState};
use postrider_proto::api::{Sending, SendingSettings};

use super::ApiResult;
use crate::{
    Shared, actions,
    auth::{Actor, Rule::Admin},
    http::input::Body,
    openapi::Operation,
};

const SENDING: &str = "/v1/sending";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(Admin, SENDING, get)
            .named("getSending", "Retrieve whether anything is sent")
            .returns::<Sending>(200, "The state of the switch."),
        Operation::put(Admin, SENDING, put)
            .named("putSending", "Stop or resume all sending")
            .describe(
                "Stops requests to all endpoints of all tenants, or resumes them. While it is stopped, events are accepted and \
                 queued, and nothing is lost. Responds once every dispatcher has applied it. A database that was restored from \
                 a backup starts stopped; `confirm_restored` is required to resume it. If it is stopped already, the time, the \
                 person and the reason of the first stop are kept; the audit log has both.",
            )
            .accepts::<SendingSettings>()
            .returns::<Sending>(200, "The state of the switch."),
    ]
}

fn view(state: SendingState) -> Json<Sending> {
    Json(Sending {
        stopped: state.stopped,
        restored: state.restored,
        identity_hidden: state.identity_hidden,
        stopped_at: state.stopped_at,
        stopped_by: state.stopped_by,
        reason: state.reason,
    })
}

async fn get(State(app): State<Shared>) -> ApiResult<Sending> {
    Ok(view(sending::state(&app.pool).await?))
}

async fn put(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Body(form): Body<SendingSettings>,
) -> ApiResult<Sending> {
    actions::sending::set(&app, &actor, &form).await.map(view)
}
