//! The headers of a request to a receiver. The code that sends a request and the code that shows one both build them here,
//! so that what is shown is what was sent.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName, HeaderValue, header};
use postrider_proto::trace::{TraceContext, TraceState};

const USER_AGENT: &str = concat!("Postrider/", env!("CARGO_PKG_VERSION"));
/// Shown in place of the value of a custom header, which may be a credential.
pub const MASKED: &str = "[hidden]";

/// Everything that decides the headers of a request, except for `Host` and `Content-Length`, which the client adds.
#[derive(Default)]
pub struct RequestHeaders<'a> {
    pub event_id: &'a str,
    pub unix_seconds: i64,
    pub signature: Option<&'a str>,
    /// The endpoint's own headers. None of them is one of ours, except that they may replace `Accept`.
    pub custom: Option<&'a HeaderMap>,
    pub marker: Option<Marker<'a>>,
    pub trace: Option<(TraceContext, Option<&'a TraceState>)>,
}

/// Marks a request that is not an event's own delivery.
#[derive(Debug, Clone, Copy)]
pub enum Marker<'a> {
    /// Of a replay with this id.
    Replay(&'a str),
    Test,
}

impl RequestHeaders<'_> {
    pub fn build(&self) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(12 + self.custom.map_or(0, HeaderMap::len));
        headers.insert(header::ACCEPT, HeaderValue::from_static("*/*"));
        for (name, value) in self.custom.into_iter().flatten() {
            headers.insert(name.clone(), value.clone());
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
        let mut insert = |name: &'static str, value: &str| {
            if let Ok(value) = HeaderValue::from_str(value) {
                headers.insert(HeaderName::from_static(name), value);
            }
        };
        insert("webhook-id", self.event_id);
        insert("webhook-timestamp", &self.unix_seconds.to_string());
        if let Some(signature) = self.signature {
            insert("webhook-signature", signature);
        }
        match self.marker {
            Some(Marker::Replay(id)) => insert("webhook-replay", id),
            Some(Marker::Test) => insert("webhook-test", "true"),
            None => {}
        }
        if let Some((context, state)) = self.trace {
            insert("traceparent", &context.to_string());
            if let Some(state) = state {
                insert("tracestate", state.as_str());
            }
        }
        headers
    }

    /// For people: with the values of custom headers masked.
    pub fn shown(&self) -> BTreeMap<String, String> {
        let headers = self.build();
        let shown = headers.iter().map(|(name, value)| {
            let is_custom = value.is_sensitive();
            let value = value.to_str().ok().filter(|_| !is_custom).unwrap_or(MASKED);
            let name = if is_custom || name.as_str().starts_with("trace") {
                name.to_string()
            } else {
                title_case(name.as_str())
            };
            (name, value.to_owned())
        });
        shown.collect()
    }
}

/// `Webhook-Id`, as documentation writes it.
fn title_case(name: &str) -> String {
    let mut begins = true;
    let letters = name.chars().map(|letter| {
        let letter = if begins {
            letter.to_ascii_uppercase()
        } else {
            letter
        };
        begins = letter == '-';
        letter
    });
    letters.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn custom_headers_are_masked_and_replace_only_accept() {
        let mut custom = HeaderMap::new();
        for (name, value) in [
            ("x-token", "abc"),
            ("accept", "text/plain"),
            ("user-agent", "curl"),
        ] {
            let mut value = HeaderValue::from_static(value);
            value.set_sensitive(true);
            custom.insert(HeaderName::from_static(name), value);
        }
        let state = TraceState::parse("a=1");
        let headers = RequestHeaders {
            custom: Some(&custom),
            marker: Some(Marker::Replay("rpl_1")),
            trace: Some((
                TraceContext::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
                    .expect("a context"),
                state.as_ref(),
            )),
            event_id: "evt_1",
            unix_seconds: 1_700_000_000,
            signature: Some("t=1,v1=ab"),
        };
        let sent = headers.build();
        assert_eq!(sent["accept"], "text/plain");
        assert_eq!(sent["user-agent"], USER_AGENT);
        let shown = headers.shown();
        for (name, value) in [
            ("Content-Type", "application/json"),
            ("User-Agent", USER_AGENT),
            ("Webhook-Id", "evt_1"),
            ("Webhook-Replay", "rpl_1"),
            ("Webhook-Signature", "t=1,v1=ab"),
            ("Webhook-Timestamp", "1700000000"),
            ("accept", MASKED),
            (
                "traceparent",
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            ),
            ("tracestate", "a=1"),
            ("x-token", MASKED),
        ] {
            assert_eq!(shown[name], value, "{name}");
        }
        assert_eq!(shown.len(), sent.len());
    }
}
