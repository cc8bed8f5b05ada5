//! The checklist of a new installation, on the overview. It ticks itself: each step is read from the database, and the
//! overview is live.

use askama::Template;
use postrider_sender::{approximate_sample, sample};
use serde_json::Value;

use super::{Markup, curl};
use crate::{
    Shared,
    auth::{Rule, Session},
    http::{cells::ask, problem::Problem},
    tables::{
        event_types,
        first_steps::{self, FirstSteps},
        schemas,
    },
};

/// After this many days an installation that sends events is not new, even if no probe was run.
const NEW_DAYS: i32 = 7;

#[derive(Template)]
#[template(path = "checklist.html")]
struct Checklist {
    steps: [Step; 5],
    done: usize,
    /// A command that emits the first event, when everything before it is done.
    command: Option<String>,
}

struct Step {
    title: &'static str,
    text: &'static str,
    is_done: bool,
    /// Where it is done, for those who may.
    link: Option<(String, &'static str)>,
}

/// Nothing once everything is done. Only the team sets an installation up.
pub(super) async fn load(app: &Shared, session: &Session) -> Result<Markup, Problem> {
    if session.scope().is_some() {
        return Ok(Markup::empty());
    }
    let answers = ask(app, |app| async move {
        Ok(first_steps::find(&app.pool, NEW_DAYS).await?)
    })
    .await?;
    let found = answers.parts().into_iter().reduce(FirstSteps::and);
    let found = found.ok_or_else(Problem::busy)?;
    let steps = steps(&found, session);
    let done = steps.iter().filter(|step| step.is_done).count();
    if done == steps.len() || found.is_old && found.has_event && found.endpoint.is_some() {
        return Ok(Markup::empty());
    }
    let command = match (&found.tenant, &found.event_type) {
        (Some(tenant), Some(event_type)) if !found.has_event && found.endpoint.is_some() => {
            Some(command(app, tenant, event_type).await?)
        }
        _ => None,
    };
    Markup::of(&Checklist { steps, done, command })
}

fn steps(found: &FirstSteps, session: &Session) -> [Step; 5] {
    let link = |rule: Rule, path: &str, label| rule.admits(session.role).then(|| (path.to_owned(), label));
    let new_endpoint = match &found.tenant {
        Some(tenant) => format!("/endpoints/new?tenant={tenant}"),
        None => "/endpoints/new".to_owned(),
    };
    let endpoint = found.endpoint.as_ref().map(|id| format!("/endpoints/{id}"));
    [
        Step {
            title: "Create a tenant",
            text: "One for each of your customers.",
            is_done: found.tenant.is_some(),
            link: link(Rule::Administer, "/tenants", "Create tenant"),
        },
        Step {
            title: "Publish an event type",
            text: "What happens in your product, with a schema of its data.",
            is_done: found.event_type.is_some(),
            link: link(Rule::Administer, "/event-types/new-type", "New event type"),
        },
        Step {
            title: "Add an endpoint",
            text: "The URL of a receiver. Customers can add theirs in the portal.",
            is_done: found.endpoint.is_some(),
            link: link(Rule::Manage, &new_endpoint, "Add endpoint"),
        },
        Step {
            title: "Emit the first event",
            text: "With the API, or with postrider.emit in the transaction of your own change.",
            is_done: found.has_event,
            link: link(Rule::See, "/docs", "API reference"),
        },
        Step {
            title: "Verify signatures",
            text: "Use the verification code in the receiver, then run a probe of the endpoint: it must pass.",
            is_done: found.is_verified,
            link: match &endpoint {
                Some(endpoint) if found.has_event => link(Rule::Operate, endpoint, "Run probe"),
                _ => link(Rule::See, "/verify", "Verification code"),
            },
        },
    ]
}

/// With sample data of the type's newest version.
async fn command(app: &Shared, tenant: &str, event_type: &str) -> Result<String, Problem> {
    let newest = match event_types::find(&app.pool, event_type).await? {
        Some(row) => schemas::of_type(&app.pool, row.id).await?.pop(),
        None => None,
    };
    let schema = newest.and_then(|row| serde_json::from_str::<Value>(row.schema.get()).ok());
    let schema = schema.unwrap_or(Value::Bool(true));
    let data = sample(&schema).unwrap_or_else(|_| approximate_sample(&schema));
    let url = format!("{}/v1/tenants/{tenant}/events", app.public_url);
    let body = format!(r#"{{"type":"{event_type}","data":{data}}}"#);
    Ok(curl::api_call(&url, &body))
}
