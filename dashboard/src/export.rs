//! Deliveries as a stream of any length: NDJSON for programs, CSV for tables.
//! Invariant: a page is in memory at a time. The next is read when the reader has taken the one before, and no connection
//! to the database is held meanwhile.

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response},
};
use http_body_util::channel::Channel;
use postrider_proto::DeliveryId;

use crate::{
    Pool,
    api::deliveries::DeliveryView,
    deliveries::{self, Filter},
    problem::Problem,
    shares::Share,
};

const PAGE: i64 = 500;
/// Pages on the way to the reader.
const PAGES_AHEAD: usize = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Ndjson,
    Csv,
}

impl Format {
    /// By `?format=`, or by what is accepted. None: a page of JSON as ever.
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
            Some(_) => Err(Problem::bad_request("format is json, ndjson or csv.")),
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

/// RFC 4180. A cell that a spreadsheet would take for a formula gets an apostrophe before it: some of these words come
/// from strangers.
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

/// What is exported.
pub(crate) struct Exported {
    /// Of the file.
    pub(crate) name: &'static str,
    /// None admits nothing.
    pub(crate) filter: Option<Filter>,
    /// Behind this one.
    pub(crate) after: Option<DeliveryId>,
    /// At most so many; none is all.
    pub(crate) limit: Option<i64>,
}

/// Within the share of its tenant, until the last page is written.
pub(crate) fn stream(pool: Pool, share: Share, wanted: Exported, format: Format) -> Response {
    let (mut sender, body) = Channel::<Bytes, sqlx::Error>::new(PAGES_AHEAD);
    let file_name = format.file_name(wanted.name);
    tokio::spawn(async move {
        let _share = share;
        let mut text = format.head();
        let mut position = wanted.after;
        let mut left = wanted.limit.unwrap_or(i64::MAX);
        loop {
            let page = match &wanted.filter {
                Some(filter) => deliveries::list(&pool, filter, position, PAGE.min(left)).await,
                None => Ok((Vec::new(), None)),
            };
            let (found, next) = match page {
                Ok(page) => page,
                Err(error) => {
                    // The reader sees a transfer that broke off, and not a file that looks whole.
                    tracing::warn!(%error, "an export could not be finished");
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
            left -= found.len() as i64;
            match next {
                Some(next) if left > 0 => position = Some(next),
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
    fn the_format_is_asked_for_by_name_or_by_what_is_accepted() {
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
