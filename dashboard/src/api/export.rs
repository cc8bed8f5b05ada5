//! Lists as files: which format is asked for, and the response that streams it.

use axum::{
    body::Body,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};

use crate::{
    Shared,
    actions::export::{self, Exported, Format},
    http::problem::Problem,
};

/// Chosen by `?format=` or the `Accept` header. `None` is an ordinary JSON page.
pub(super) fn format(query: Option<&str>, headers: &HeaderMap) -> Result<Option<Format>, Problem> {
    let accepts = |kind: &str| {
        headers
            .get_all(header::ACCEPT)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .any(|one| one.split(';').next().is_some_and(|one| one.trim() == kind))
    };
    match query {
        Some("ndjson") => Ok(Some(Format::Ndjson)),
        Some("csv") => Ok(Some(Format::Csv)),
        Some("json") => Ok(None),
        Some(other) => Err(Problem::bad_request(format!(
            "Invalid format {other:?}: must be json, ndjson or csv."
        ))),
        None if accepts("application/x-ndjson") => Ok(Some(Format::Ndjson)),
        None if accepts("text/csv") => Ok(Some(Format::Csv)),
        None => Ok(None),
    }
}

/// Counts against the share of its holder, a tenant or a person, until its last page is written.
pub(crate) async fn download(
    app: &Shared,
    holder: &str,
    name: &str,
    wanted: Exported,
    format: Format,
) -> Result<Response, Problem> {
    let share = app.limits.exports.take(holder).await?;
    let (content_type, ending) = match format {
        Format::Ndjson => ("application/x-ndjson", "ndjson"),
        Format::Csv => ("text/csv; charset=utf-8", "csv"),
    };
    let headers = [
        (header::CONTENT_TYPE, content_type.to_owned()),
        (
            header::CONTENT_DISPOSITION,
            format!("attachment; filename=\"{name}.{ending}\""),
        ),
    ];
    let pages = export::stream(app.clone(), share, wanted, format);
    Ok((headers, Body::new(pages)).into_response())
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn the_format_is_chosen_by_name_or_accept_header() {
        let mut headers = HeaderMap::new();
        assert_eq!(format(None, &headers).ok(), Some(None));
        headers.insert(
            header::ACCEPT,
            HeaderValue::from_static("text/html, text/csv;q=0.9"),
        );
        assert_eq!(format(None, &headers).ok(), Some(Some(Format::Csv)));
        assert_eq!(format(Some("ndjson"), &headers).ok(), Some(Some(Format::Ndjson)));
        assert!(format(Some("xml"), &headers).is_err());
    }
}
