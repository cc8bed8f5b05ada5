//! A test: one made-up event sent to an endpoint right now, outside the queue, and told what came of it.
//! It goes through the same guard and is signed like any other, carries `Webhook-Test: true`, is stored nowhere and tried
//! once. It works for a paused endpoint too: that is when its owner wants to know.

use std::{
    collections::BTreeMap,
    sync::LazyLock,
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use chrono::{DateTime, SecondsFormat, Utc};
use postrider_dispatcher::{
    send::{Request, Sender, webhook_headers},
    vault::Purpose,
};
use postrider_proto::{
    routing::matching_patterns,
    signature::{self, Secret},
};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use url::Url;

use crate::{
    Shared,
    api::secrets::open_in_force,
    audit::{self, Action, Entry},
    auth::{Actor, Tenant},
    problem::{Kind, Problem},
    tables::{
        self, attempts::AttemptRow, endpoints::EndpointRow, event_types, event_types::EventTypeRow,
        random_public_id, schemas,
    },
    transcript::{Attempt, custom_header_names},
};

/// Shorter than a request of ours may take.
const TIME_MAX: Duration = Duration::from_secs(15);
const AT_ONCE_MAX: usize = 8;
/// Types looked through for one that the endpoint asks for.
const TYPES_MAX: i64 = 1_000;
/// Of a test when there is no type to make one of.
const PLAIN_TYPE: &str = "postrider.test";

/// Tests wait for people: a few at a time are enough, and nobody can make a load of them.
static AT_ONCE: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(AT_ONCE_MAX));

/// What is made up.
struct Made {
    event_type: String,
    version: String,
    data: Value,
}

/// Sends the test and answers with the attempt.
pub(crate) async fn send(
    app: &Shared,
    actor: &Actor,
    tenant: &Tenant,
    endpoint: &EndpointRow,
    wanted_type: Option<&str>,
) -> Result<Attempt, Problem> {
    let _one = AT_ONCE.try_acquire().map_err(|_| {
        Problem::new(
            Kind::Busy,
            "Other tests are under way. Try again in a few seconds.",
        )
    })?;
    let made = make_up(app, endpoint, wanted_type).await?;
    let mut transaction = tables::begin(&app.pool).await?;
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(&mut *transaction)
        .await?;
    let opened = open_in_force(&app.vault, &mut transaction, endpoint.owner()).await?;
    let secrets: Vec<Secret> = opened.into_iter().map(|one| one.secret).collect();
    let entry = Entry {
        actor,
        action: Action::EndpointTested,
        tenant: Some(tenant.id),
        subject: &endpoint.public_id,
        detail: Some(json!({ "type": made.event_type })),
    };
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;

    let id = random_public_id("evt_test");
    let body = json!({
        "id": id,
        "type": made.event_type,
        "created_at": now.to_rfc3339_opts(SecondsFormat::Millis, true),
        "api_version": made.version,
        "data": made.data,
    })
    .to_string();
    let signed = signature::sign(
        endpoint.settings.signature,
        &id,
        now.timestamp(),
        body.as_bytes(),
        &secrets,
    );
    let mut headers = webhook_headers(&id, now.timestamp(), &signed);
    headers.insert(
        HeaderName::from_static("webhook-test"),
        HeaderValue::from_static("true"),
    );
    add_custom(app, endpoint, &mut headers);
    let url = Url::parse(&endpoint.settings.url).map_err(|_| Problem::invalid("/url", "can't be read"))?;
    let timeout = endpoint
        .settings
        .timeout_ms
        .map_or(app.defaults.timeout, |ms| Duration::from_millis(ms.max(1) as u64));
    let sender = Sender::new(app.guard.clone()).map_err(|error| {
        tracing::error!(%error, "the HTTP client can't be made");
        Problem::new(Kind::Internal, "It has been logged.")
    })?;
    let began = Instant::now();
    let outcome = sender
        .send(Request {
            url: &url,
            headers,
            body: body.into(),
            timeout: timeout.min(TIME_MAX),
        })
        .await;
    let row = AttemptRow {
        number: 1,
        started_at: now,
        duration_ms: i32::try_from(began.elapsed().as_millis()).unwrap_or(i32::MAX),
        outcome: outcome.kind() as i16,
        status: outcome.status().map(|status| status as i16),
        error: outcome.error().map(str::to_owned),
        signature: outcome.was_sent().then_some(signed),
        response_head: outcome.answer().map(|answer| answer.head.clone()),
        response_body: outcome.answer().map(|answer| answer.body.clone()),
        replay_id: None,
    };
    let mut attempt = Attempt::of(row, &id, &custom_header_names(&app.vault, endpoint));
    if !attempt.request_headers.is_empty() {
        attempt
            .request_headers
            .insert("Webhook-Test".to_owned(), "true".to_owned());
    }
    Ok(attempt)
}

fn add_custom(app: &Shared, endpoint: &EndpointRow, headers: &mut HeaderMap) {
    let Some(sealed) = &endpoint.headers else { return };
    let opened = app.vault.open(endpoint.owner(), Purpose::Headers, sealed).ok();
    let pairs = opened.and_then(|clear| serde_json::from_slice::<BTreeMap<String, String>>(&clear).ok());
    for (name, value) in pairs.unwrap_or_default() {
        if let (Ok(name), Ok(mut value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            value.set_sensitive(true);
            headers.insert(name, value);
        }
    }
}

/// Of the type that was named, or of the first one that the endpoint asks for.
async fn make_up(app: &Shared, endpoint: &EndpointRow, wanted: Option<&str>) -> Result<Made, Problem> {
    let found = match wanted {
        Some(name) => Some(
            event_types::find(&app.pool, name)
                .await?
                .ok_or_else(|| Problem::invalid("/type", "there is no such event type"))?,
        ),
        None => event_types::list(&app.pool, "", TYPES_MAX)
            .await?
            .into_iter()
            .find(|row| is_asked_for(endpoint, row)),
    };
    let plain = || Made {
        event_type: PLAIN_TYPE.to_owned(),
        version: "1".to_owned(),
        data: json!({ "test": true }),
    };
    let Some(row) = found else { return Ok(plain()) };
    let versions = schemas::of_type(&app.pool, row.id).await?;
    let pinned = endpoint
        .settings
        .versions
        .as_ref()
        .and_then(|versions| versions.0.get(&row.name));
    let schema = versions
        .iter()
        .rev()
        .find(|one| pinned.is_none_or(|version| *version == one.version))
        .or(versions.last());
    Ok(match schema {
        None => plain(),
        Some(one) => Made {
            event_type: row.name,
            version: one.version.clone(),
            data: example(&serde_json::from_str(one.schema.get()).unwrap_or_default()),
        },
    })
}

fn is_asked_for(endpoint: &EndpointRow, row: &EventTypeRow) -> bool {
    let patterns = matching_patterns(&row.name);
    endpoint
        .settings
        .types
        .iter()
        .any(|asked| patterns.iter().any(|pattern| pattern == asked))
}

/// What the schema itself gives as an example.
fn example(schema: &Value) -> Value {
    match schema.pointer("/examples/0") {
        Some(example @ Value::Object(_)) => example.clone(),
        _ => json!({ "test": true }),
    }
}
