//! Exports of deliveries as NDJSON or CSV streams of any length.
//! Invariant: only one page is in memory at a time. The next page is read after the client has received the previous one,
//! and no database connection is held in between.

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response},
};
use http_body_util::channel::Channel;
use postrider_proto::DeliveryId;

use crate::{
    Pool,
    actions::delivery_view::DeliveryView,
    http::{problem::Problem, shares::Share},
    tables::deliveries::{self, Filter},
};

const PAGE: i64 = 500;
/// Pages buffered for the client.
const PAGES_AHEAD: usize = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Ndjson,
    Csv,
}

impl Format {
    /// Chosen by `?format=` or the `Accept` header. `None` is an ordinary JSON page.
    pub(crate) fn wanted(query: Option<&str>, headers: &HeaderMap) -> Result<Option<Self>, Problem> {
        let accepts = |kind: &str| {
            headers
                .get_all(header::ACCEPT)
                .iter()
                .filter_map(|value| value.to_str().ok())
                .flat_map(|value| value.split(','))
                .any(|one| one.split(';').next().is_some_and(|one| one.trim() == kind))
        };
        match query {
            Some("ndjson") => Ok(Some(Self::Ndjson)),
            Some("csv") => Ok(Some(Self::Csv)),
            Some("json") => Ok(None),
            Some(other) => Err(Problem::bad_request(format!(
                "Invalid format {other:?}: must be json, ndjson or csv."
            ))),
            None if accepts("application/x-ndjson") => Ok(Some(Self::Ndjson)),
            None if accepts("text/csv") => Ok(Some(Self::Csv)),
            None => Ok(None),
        }
    }

    const fn content_type(self) -> HeaderValue {
        match self {
            Self::Ndjson => HeaderValue::from_static("application/x-ndjson"),
            Self::Csv => HeaderValue::from_static("text/csv; charset=utf-8"),
        }
    }

    fn file_name(self, name: &str) -> HeaderValue {
        let ending = match self {
            Self::Ndjson => "ndjson",
            Self::Csv => "csv",
        };
        HeaderValue::from_str(&format!("attachment; filename=\"{name}.{ending}\""))
            .unwrap_or(HeaderValue::from_static("attachment"))
    }

    fn head(self) -> String {
        match self {
            Self::Ndjson => String::new(),
            Self::Csv => format!("{}\r\n", DeliveryView::CSV_COLUMNS.join(",")),
        }
    }

    fn write(self, view: &DeliveryView, out: &mut String) -> Result<(), serde_json::Error> {
        match self {
            Self::Ndjson => {
                out.push_str(&serde_json::to_string(view)?);
                out.push('\n');
            }
            Self::Csv => {
                for (index, cell) in view.csv_cells().iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    write_cell(cell, out);
                }
                out.push_str("\r\n");
            }
        }
        Ok(())
    }
}

/// RFC 4180. Cells that a spreadsheet would evaluate as a formula are prefixed with an apostrophe, because they may
/// contain text from third parties.
fn write_cell(cell: &str, out: &mut String) {
    let formula = cell.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let quoted = cell.contains(['"', ',', '\n', '\r']);
    if quoted {
        out.push('"');
    }
    if formula {
        out.push('\'');
    }
    out.push_str(&cell.replace('"', "\"\""));
    if quoted {
        out.push('"');
    }
}

/// The deliveries to export.
pub(crate) struct Exported {
    /// The file name without its extension.
    pub(crate) name: &'static str,
    /// `None` matches nothing.
    pub(crate) filter: Option<Filter>,
    /// Start after this delivery.
    pub(crate) after: Option<DeliveryId>,
    /// The maximum number of deliveries; `None` is all.
    pub(crate) limit: Option<i64>,
}

/// Streams the export. It counts against the tenant's share until the last page is written.
pub(crate) fn stream(pool: Pool, share: Share, wanted: Exported, format: Format) -> Response {
    let (mut sender, body) = Channel::<Bytes, sqlx::Error>::new(PAGES_AHEAD);
    let file_name = format.file_name(wanted.name);
    tokio::spawn(async move {
        let _share = share;
        let mut text = format.head();
        let mut position = wanted.after;
        let mut remaining = wanted.limit.unwrap_or(i64::MAX);
        loop {
            let page = match &wanted.filter {
                Some(filter) => deliveries::list(&pool, filter, position, PAGE.min(remaining)).await,
                None => Ok((Vec::new(), None)),
            };
            let (found, next) = match page {
                Ok(page) => page,
                Err(error) => {
                    // Abort the transfer, so that the client does not mistake a partial file for a complete one.
                    tracing::warn!(%error, "export aborted by a database error");
                    return sender.abort(error);
                }
            };
            for delivery in &found {
                if let Err(error) = format.write(&DeliveryView::from(delivery), &mut text) {
                    return sender.abort(sqlx::Error::Encode(Box::new(error)));
                }
            }
            if !text.is_empty() && sender.send_data(std::mem::take(&mut text).into()).await.is_err() {
                return;
            }
            remaining -= found.len() as i64;
            match next {
                Some(next) if remaining > 0 => position = Some(next),
                _ => return,
            }
        }
    });
    let headers = [
        (header::CONTENT_TYPE, format.content_type()),
        (header::CONTENT_DISPOSITION, file_name),
    ];
    (headers, Body::new(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(text: &str) -> String {
        let mut out = String::new();
        write_cell(text, &mut out);
        out
    }

    #[test]
    fn cells_are_quoted_and_formulas_are_disarmed() {
        assert_eq!(cell("plain"), "plain");
        assert_eq!(cell("a,\"b\"\n"), "\"a,\"\"b\"\"\n\"");
        for formula in ["=1+1", "+1", "-1", "@SUM(A1)", "\tx"] {
            assert_eq!(cell(formula), format!("'{formula}"));
        }
        assert_eq!(cell("=HYPERLINK(\"x\",1)"), "\"'=HYPERLINK(\"\"x\"\",1)\"");
    }

    #[test]
    fn the_format_is_chosen_by_name_or_accept_header() {
        let mut headers = HeaderMap::new();
        assert_eq!(Format::wanted(None, &headers).ok(), Some(None));
        headers.insert(
            header::ACCEPT,
            HeaderValue::from_static("text/html, text/csv;q=0.9"),
        );
        assert_eq!(Format::wanted(None, &headers).ok(), Some(Some(Format::Csv)));
        assert_eq!(
            Format::wanted(Some("ndjson"), &headers).ok(),
            Some(Some(Format::Ndjson))
        );
        assert!(Format::wanted(Some("xml"), &headers).is_err());
    }
}
