//! Exports of deliveries as NDJSON or CSV streams of any length.
//! Invariant: only one page is in memory at a time. The next page is read after the client has received the previous one,
//! and no database connection is held in between.

use std::io::ErrorKind;

use axum::body::Bytes;
use chrono::{DateTime, Utc};
use http_body_util::channel::Channel;
use postrider_proto::{DeliveryId, api};

use crate::{
    Shared,
    http::{
        cells::{ask, merge},
        shares::Share,
    },
    tables::deliveries::{self, Delivery, Filter},
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
    fn head(self) -> String {
        match self {
            Self::Ndjson => String::new(),
            Self::Csv => format!("{}\r\n", CSV_COLUMNS.join(",")),
        }
    }

    fn write(self, view: &api::Delivery, out: &mut String) -> Result<(), serde_json::Error> {
        match self {
            Self::Ndjson => {
                out.push_str(&serde_json::to_string(view)?);
                out.push('\n');
            }
            Self::Csv => {
                for (index, cell) in csv_cells(view).iter().enumerate() {
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

const CSV_COLUMNS: [&str; 12] = [
    "id",
    "event",
    "type",
    "endpoint",
    "state",
    "reason",
    "attempt_count",
    "status_code",
    "error",
    "created_at",
    "last_attempt_at",
    "next_attempt_at",
];

fn csv_cells(delivery: &api::Delivery) -> [String; 12] {
    let time = |time: Option<DateTime<Utc>>| time.map(|time| time.to_rfc3339()).unwrap_or_default();
    [
        delivery.id.clone(),
        delivery.event.clone(),
        delivery.r#type.clone(),
        delivery.endpoint.clone(),
        delivery.state.as_str().to_owned(),
        delivery
            .reason
            .map(|reason| reason.to_string())
            .unwrap_or_default(),
        delivery.attempt_count.to_string(),
        delivery
            .status_code
            .map(|code| code.to_string())
            .unwrap_or_default(),
        delivery.error.clone().unwrap_or_default(),
        time(delivery.created_at),
        time(delivery.last_attempt_at),
        time(delivery.next_attempt_at),
    ]
}

/// RFC 4180. Cells that a spreadsheet would evaluate as a formula are prefixed with an apostrophe, because they may
/// contain text from third parties.
pub(crate) fn write_cell(cell: &str, out: &mut String) {
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
    /// `None` matches nothing.
    pub(crate) filter: Option<Filter>,
    /// Start after this delivery.
    pub(crate) after: Option<DeliveryId>,
    /// The maximum number of deliveries; `None` is all.
    pub(crate) limit: Option<i64>,
}

/// The text of the export, page by page. The share is held until the last page is written.
pub(crate) fn stream(
    app: Shared,
    share: Share,
    wanted: Exported,
    format: Format,
) -> Channel<Bytes, sqlx::Error> {
    let (mut sender, body) = Channel::<Bytes, sqlx::Error>::new(PAGES_AHEAD);
    tokio::spawn(async move {
        let _share = share;
        let mut text = format.head();
        let mut position = wanted.after;
        let mut remaining = wanted.limit.unwrap_or(i64::MAX);
        loop {
            let page = match &wanted.filter {
                Some(filter) => next_page(&app, filter, position, PAGE.min(remaining)).await,
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
                if let Err(error) = format.write(&api::Delivery::from(delivery), &mut text) {
                    return sender.abort(sqlx::Error::Encode(Box::new(error)));
                }
            }
            // Also without text: this is how a client that has gone is noticed.
            if sender.send_data(std::mem::take(&mut text).into()).await.is_err() {
                return;
            }
            remaining -= found.len() as i64;
            match next {
                Some(next) if remaining > 0 => position = Some(next),
                _ => return,
            }
        }
    });
    body
}

/// Of all cells. None may be missing in a file.
async fn next_page(
    app: &Shared,
    filter: &Filter,
    after: Option<DeliveryId>,
    limit: i64,
) -> sqlx::Result<(Vec<Delivery>, Option<DeliveryId>)> {
    if !app.cells.any() {
        return deliveries::list(&app.pool, filter, after, limit).await;
    }
    let answers = ask(app, |app| {
        let filter = filter.clone();
        async move { Ok(deliveries::list(&app.pool, &filter, after, limit).await?) }
    })
    .await;
    match answers {
        Ok(answers) if answers.silent.is_empty() => Ok(merge(answers.parts(), limit, Delivery::id)),
        _ => Err(sqlx::Error::Io(ErrorKind::NotConnected.into())),
    }
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
}
