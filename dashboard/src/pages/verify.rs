//! The verification code page: snippets in four languages, with the headers of the endpoint's latest delivery.

use askama::Template;
use askama_web::WebTemplate;
use postrider_proto::{DeliveryState, EndpointId, TenantId, state::SignatureFormat};
use serde::Deserialize;

use super::{Frame, Moment, Paged};
use crate::{
    Shared,
    auth::Visit,
    http::{
        cells::{Purpose, ask},
        input::Query,
        problem::Problem,
    },
    tables::{
        attempts,
        cells::Possession,
        deliveries::{self, Filter},
        endpoints::{self, EndpointRow},
        events,
    },
};

/// Requests with a longer body are not shown as a sample.
const BODY_SHOWN_MAX: usize = 4 * 1024;
const ENDPOINTS_SHOWN_MAX: i64 = 100;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct VerifyQuery {
    endpoint: String,
    language: String,
}

struct Language {
    word: &'static str,
    name: &'static str,
}

const LANGUAGES: [Language; 4] = [
    Language {
        word: "python",
        name: "Python",
    },
    Language {
        word: "node",
        name: "Node",
    },
    Language {
        word: "go",
        name: "Go",
    },
    Language {
        word: "rust",
        name: "Rust",
    },
];

/// The latest request that the endpoint accepted.
struct Sample {
    event: String,
    timestamp: i64,
    header: String,
    body: String,
    sent: Moment,
}

struct Choice {
    id: String,
    url: String,
}

#[derive(Template, WebTemplate)]
#[template(path = "verify.html")]
pub(crate) struct VerifyPage {
    frame: Frame,
    endpoints: Vec<Choice>,
    endpoint: String,
    format: SignatureFormat,
    public_key: Option<String>,
    language: &'static Language,
    snippet: &'static str,
    sample: Option<Sample>,
}

pub(crate) async fn show(visit: Visit, Query(query): Query<VerifyQuery>) -> Paged<VerifyPage> {
    let scope = visit.session.scope();
    let answers = ask(&visit.app, move |app| async move {
        Ok(endpoints::newest(&app.pool, scope, ENDPOINTS_SHOWN_MAX).await?)
    })
    .await?;
    let silent = answers.silent.clone();
    let choices: Vec<EndpointRow> = answers.parts().into_iter().flatten().collect();
    let (visit, query) = in_cell_of_first(visit, query, &choices).await?;
    let row = match query.endpoint.trim() {
        "" => match latest(&visit.app, scope).await? {
            Some(number) => endpoints::find_by_id(&visit.app.pool, number).await?,
            None => choices.first().cloned(),
        },
        id => match endpoints::find_number(&visit.app.pool, scope, id).await? {
            Some(number) => endpoints::find_by_id(&visit.app.pool, number).await?,
            None => return Err(Problem::not_found("endpoint").into()),
        },
    };
    let language = match query.language.as_str() {
        "" => &LANGUAGES[0],
        word => LANGUAGES
            .iter()
            .find(|language| language.word == word)
            .ok_or_else(|| Problem::not_found("language"))?,
    };
    let format = row
        .as_ref()
        .map_or(SignatureFormat::TV1, |row| row.settings.signature);
    let sample = match &row {
        Some(row) => sample(&visit.app, row.tenant_id, row.id).await?,
        None => None,
    };
    Ok(VerifyPage {
        frame: Frame::new(visit.session, "verify").without(&silent),
        endpoint: row.as_ref().map(|row| row.public_id.clone()).unwrap_or_default(),
        public_key: row.and_then(|row| row.public_key),
        endpoints: choices
            .into_iter()
            .map(|row| Choice {
                id: row.public_id,
                url: row.settings.url,
            })
            .collect(),
        format,
        language,
        snippet: snippet(format, language.word),
        sample,
    })
}

/// Of several cells, that of the first endpoint is shown until one is chosen.
async fn in_cell_of_first(
    visit: Visit,
    query: VerifyQuery,
    choices: &[EndpointRow],
) -> Result<(Visit, VerifyQuery), Problem> {
    match choices
        .first()
        .filter(|_| visit.app.cells.any() && query.endpoint.trim().is_empty())
    {
        None => Ok((visit, query)),
        Some(first) => {
            let endpoint = first.public_id.clone();
            let what = Possession::Endpoint(endpoint.clone());
            let visit = visit.at(&what, Purpose::Read).await?;
            Ok((visit, VerifyQuery { endpoint, ..query }))
        }
    }
}

/// The endpoint of the latest successful delivery, which has a real header to show.
async fn latest(app: &Shared, scope: Option<TenantId>) -> Result<Option<EndpointId>, Problem> {
    let filter = Filter {
        tenant: scope,
        state: Some(DeliveryState::Delivered),
        ..Filter::default()
    };
    let (found, _) = deliveries::list(&app.pool, &filter, None, 1).await?;
    Ok(found.first().map(|delivery| delivery.id().endpoint))
}

async fn sample(app: &Shared, tenant: TenantId, endpoint: EndpointId) -> Result<Option<Sample>, Problem> {
    let filter = Filter {
        tenant: Some(tenant),
        endpoint: Some(endpoint),
        state: Some(DeliveryState::Delivered),
        ..Filter::default()
    };
    let (found, _) = deliveries::list(&app.pool, &filter, None, 1).await?;
    let Some(delivery) = found.first() else {
        return Ok(None);
    };
    let id = delivery.id();
    let attempt = attempts::of_delivery(&app.pool, id)
        .await?
        .into_iter()
        .find(|attempt| attempt.signature.is_some());
    let body = events::load(&app.pool, delivery.tenant_id, &[id.event])
        .await?
        .pop()
        .map(|event| event.body);
    let (Some(attempt), Some(body)) = (attempt, body) else {
        return Ok(None);
    };
    if body.len() > BODY_SHOWN_MAX {
        return Ok(None);
    }
    Ok(Some(Sample {
        event: delivery.event(),
        timestamp: attempt.started_at.timestamp(),
        header: attempt.signature.unwrap_or_default(),
        body: String::from_utf8_lossy(&body).into_owned(),
        sent: Moment(Some(attempt.started_at)),
    }))
}

macro_rules! snippets {
    ($($format:ident { $($word:literal => $file:literal),+ $(,)? })+) => {
        fn snippet(format: SignatureFormat, language: &str) -> &'static str {
            match (format, language) {
                $($((SignatureFormat::$format, $word) => include_str!(concat!("../../snippets/", $file)),)+)+
                _ => "",
            }
        }
    };
}
snippets! {
    TV1 { "python" => "t_v1.py", "node" => "t_v1.mjs", "go" => "t_v1.go.txt", "rust" => "t_v1.rs.txt" }
    Standard { "python" => "standard.py", "node" => "standard.mjs", "go" => "standard.go.txt", "rust" => "standard.rs.txt" }
    StandardEd25519 { "python" => "ed25519.py", "node" => "ed25519.mjs", "go" => "ed25519.go.txt", "rust" => "ed25519.rs.txt" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_a_snippet_in_every_language() {
        for format in SignatureFormat::ALL {
            for language in &LANGUAGES {
                assert!(
                    snippet(*format, language.word).len() > 100,
                    "{format} {}",
                    language.word
                );
            }
        }
    }
}
