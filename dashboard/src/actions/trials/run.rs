//! Runs one test event or one probe and returns its result.

use std::time::Instant;

use postrider_proto::api::{ProbeFinding, ProbeReport, TestAttempt};
use serde_json::{Value, json};
use sqlx::PgConnection;

use super::{
    PROBES, TESTS, Target, admit,
    checks::{Finding, has_passed, score, texts},
    event::Model,
    probe::Probe,
};
use crate::{
    Shared,
    auth::{Actor, Tenant},
    http::problem::Problem,
    tables::{
        audit::{self, Action, Entry},
        endpoints::{self, EndpointRow},
        trials,
    },
};

/// The endpoint to test and the caller.
pub(crate) struct Asked {
    pub(crate) actor: Actor,
    pub(crate) tenant: Tenant,
    pub(crate) endpoint: String,
}

impl From<Finding> for ProbeFinding {
    fn from(finding: Finding) -> Self {
        let texts = texts(finding.check);
        Self {
            check: finding.check,
            verdict: finding.verdict,
            title: texts.title.to_owned(),
            found: finding.found,
            meaning: texts.meaning.to_owned(),
            fix: texts.fix.to_owned(),
        }
    }
}

/// A result that the audit log records.
pub(crate) trait Recorded {
    fn audited(&self) -> (Action, Value);
}

impl Recorded for TestAttempt {
    fn audited(&self) -> (Action, Value) {
        let detail = json!({"outcome": self.attempt.outcome, "type": self.r#type});
        (Action::EndpointTested, detail)
    }
}

impl Recorded for ProbeReport {
    fn audited(&self) -> (Action, Value) {
        (Action::EndpointProbed, json!({"score": self.score}))
    }
}

/// Called after the requests, so that no transaction is open while they are sent.
pub(crate) async fn record(
    connection: &mut PgConnection,
    asked: &Asked,
    result: &impl Recorded,
) -> Result<(), Problem> {
    let (action, detail) = result.audited();
    let entry = Entry::new(&asked.actor, action, Some(asked.tenant.id), &asked.endpoint).with(detail);
    Ok(audit::write(connection, entry).await?)
}

/// Paused and disabled endpoints too: owners fix the receiver first and enable the endpoint afterwards.
async fn prepare(
    app: &Shared,
    asked: &Asked,
    event_type: Option<&str>,
) -> Result<(EndpointRow, Target, Model), Problem> {
    let mut connection = app.pool.acquire().await?;
    let row = endpoints::find(&mut *connection, asked.tenant.id, &asked.endpoint)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let model = Model::choose(&mut connection, &row, event_type).await?;
    let target = Target::open(app, &mut connection, &row).await?;
    Ok((row, target, model))
}

/// Sends one test event and returns the attempt, successful or not.
pub(crate) async fn test(
    app: &Shared,
    asked: &Asked,
    event_type: Option<&str>,
) -> Result<TestAttempt, Problem> {
    let (row, target, model) = prepare(app, asked, event_type).await?;
    let _place = admit(app, &row, TESTS).await?;
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
        attempt: sent.attempt(),
        event: event.id,
        r#type: model.type_name,
        version: model.version,
    })
}

pub(crate) async fn probe(
    app: &Shared,
    asked: &Asked,
    event_type: Option<&str>,
) -> Result<ProbeReport, Problem> {
    let began = Instant::now();
    let (row, target, model) = prepare(app, asked, event_type).await?;
    let _place = admit(app, &row, PROBES).await?;
    let type_name = model.type_name.clone();
    let probe = Probe::new(target, model, app.trials.sender.clone());
    let findings = probe.run().await;
    if has_passed(&findings) {
        trials::note_pass(&app.pool, row.id, PROBES).await?;
    }
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
