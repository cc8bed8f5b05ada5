//! Test events and probes for an endpoint. `trials` sends them; none of them becomes a delivery.

use axum::{
    Extension,
    extract::{FromRequestParts, Path, State},
    http::{StatusCode, request::Parts},
    response::Response,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Instant;
use utoipa::ToSchema;

use crate::{
    Shared,
    actions::{
        audit::{self, Action, Entry},
        trials::{
            self, PROBES, TESTS, Target,
            checks::{Check, Finding, Verdict, has_passed, score},
            event::Model,
            probe::Probe,
        },
    },
    auth::{Actor, Tenant},
    http::{
        idempotency::{Claim, Running, Work},
        input::OptionalBody,
        problem::Problem,
    },
    openapi::shapes,
    tables::{
        attempt_view::Attempt,
        endpoints::{self, EndpointRow},
    },
};

#[derive(Default, Deserialize, ToSchema)]
#[schema(as = TestRequest)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrialForm {
    #[schema(schema_with = shapes::type_or_null)]
    r#type: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct TestAttempt {
    #[serde(flatten)]
    attempt: Attempt,
    event: String,
    r#type: String,
    version: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ProbeReport {
    endpoint: String,
    url: String,
    r#type: String,
    /// Score out of 100.
    score: u32,
    /// No check failed and none was skipped.
    passed: bool,
    requests: usize,
    duration_ms: u64,
    checks: Vec<ProbeFinding>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ProbeFinding {
    #[schema(inline)]
    check: Check,
    #[schema(inline)]
    verdict: Verdict,
    title: &'static str,
    /// What was observed.
    found: String,
    meaning: &'static str,
    fix: &'static str,
}

impl From<Finding> for ProbeFinding {
    fn from(finding: Finding) -> Self {
        let texts = finding.check.texts();
        Self {
            check: finding.check,
            verdict: finding.verdict,
            title: texts.title,
            found: finding.found,
            meaning: texts.meaning,
            fix: texts.fix,
        }
    }
}

/// Paused and disabled endpoints too: owners fix the receiver first and enable the endpoint afterwards.
async fn prepare(
    app: &Shared,
    tenant: &Tenant,
    id: &str,
    form: &TrialForm,
) -> Result<(EndpointRow, Target, Model), Problem> {
    let mut connection = app.pool.acquire().await?;
    let row = endpoints::find(&mut *connection, tenant.id, id)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let model = Model::choose(&mut connection, &row, form.r#type.as_deref()).await?;
    let target = Target::open(app, &mut connection, &row).await?;
    Ok((row, target, model))
}

/// Sends one test event and returns the attempt, successful or not.
pub(crate) async fn send_test(
    app: &Shared,
    tenant: &Tenant,
    id: &str,
    form: &TrialForm,
) -> Result<TestAttempt, Problem> {
    let (row, target, model) = prepare(app, tenant, id, form).await?;
    let _place = trials::admit(app, &row, TESTS).await?;
    let event = model.event(target.now(), None);
    let t = target.now().timestamp();
    let signature = target.sign(&event.id, t, &event.body, &target.secrets);
    let sent = target
        .send(
            &app.trials.sender,
            &event.id,
            t,
            Some(signature),
            event.body,
            target.timeout,
        )
        .await;
    Ok(TestAttempt {
        attempt: target.attempt(&sent),
        event: event.id,
        r#type: model.type_name,
        version: model.version,
    })
}

pub(crate) async fn run_probe(
    app: &Shared,
    tenant: &Tenant,
    id: &str,
    form: &TrialForm,
) -> Result<ProbeReport, Problem> {
    let began = Instant::now();
    let (row, target, model) = prepare(app, tenant, id, form).await?;
    let _place = trials::admit(app, &row, PROBES).await?;
    let type_name = model.type_name.clone();
    let probe = Probe::new(target, model, app.trials.sender.clone());
    let findings = probe.run().await;
    Ok(ProbeReport {
        endpoint: row.public_id,
        url: row.settings.url,
        r#type: type_name,
        score: score(&findings),
        passed: has_passed(&findings),
        requests: probe.requests(),
        duration_ms: began.elapsed().as_millis() as u64,
        checks: findings.into_iter().map(ProbeFinding::from).collect(),
    })
}

pub(crate) async fn test(
    State(app): State<Shared>,
    asked: Asked,
    claim: Claim,
    OptionalBody(form): OptionalBody<TrialForm>,
) -> Result<Response, Problem> {
    let trial = async {
        let view = send_test(&app, &asked.tenant, &asked.endpoint, &form).await?;
        let detail = json!({"outcome": view.attempt.outcome, "type": view.r#type});
        Ok(((Action::EndpointTested, detail), view))
    };
    run(&app, claim, &asked, trial).await
}

pub(crate) async fn probe(
    State(app): State<Shared>,
    asked: Asked,
    claim: Claim,
    OptionalBody(form): OptionalBody<TrialForm>,
) -> Result<Response, Problem> {
    let trial = async {
        let report = run_probe(&app, &asked.tenant, &asked.endpoint, &form).await?;
        let detail = json!({"score": report.score});
        Ok(((Action::EndpointProbed, detail), report))
    };
    run(&app, claim, &asked, trial).await
}

/// The endpoint to test and the caller.
pub(crate) struct Asked {
    pub(crate) actor: Actor,
    pub(crate) tenant: Tenant,
    pub(crate) endpoint: String,
}

impl FromRequestParts<Shared> for Asked {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Response> {
        type Given = (Extension<Actor>, Extension<Tenant>, Path<(String, String)>);
        let given = Given::from_request_parts(parts, app).await;
        let (Extension(actor), Extension(tenant), Path((_, endpoint))) = given?;
        Ok(Self {
            actor,
            tenant,
            endpoint,
        })
    }
}

/// Holds the `Idempotency-Key` while it runs.
async fn run<T: Serialize>(
    app: &Shared,
    claim: Claim,
    asked: &Asked,
    trial: impl Future<Output = Result<((Action, serde_json::Value), T), Problem>>,
) -> Result<Response, Problem> {
    let running = Running::begin(app, &claim).await?;
    let answered = match trial.await {
        Ok((done, view)) => answer(app, claim, asked, done, &view).await,
        Err(problem) => Err(problem),
    };
    running.end().await;
    answered
}

/// After the requests, so that no transaction is open while they are sent.
async fn answer<T: Serialize>(
    app: &Shared,
    claim: Claim,
    asked: &Asked,
    (action, detail): (Action, serde_json::Value),
    view: &T,
) -> Result<Response, Problem> {
    let mut work = Work::begin(app, claim).await?;
    let entry = Entry {
        actor: &asked.actor,
        action,
        tenant: Some(asked.tenant.id),
        subject: &asked.endpoint,
        detail: Some(detail),
    };
    audit::write(&mut work, entry).await?;
    work.commit(StatusCode::OK, view).await
}
