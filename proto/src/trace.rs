//! Trace contexts, as carried by the W3C header `traceparent`.
//! Random parts of an id are passed in.

use std::fmt;

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

use crate::{DeliveryId, EventId};

/// Shared by all spans of one trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceId([u8; 16]);

/// One span.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanId([u8; 8]);

/// The position in a trace that a caller passes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    pub trace: TraceId,
    /// The caller's span: the parent of the work done for it.
    pub span: SpanId,
    /// Whether the trace is recorded.
    pub sampled: bool,
}

/// Vendor-specific trace data: the header `tracestate`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceState(String);

/// Characters that every participant must propagate.
pub const STATE_CHARS_MAX: usize = 512;
const STATE_MEMBERS_MAX: usize = 32;
const STATE_PART_CHARS_MAX: usize = 256;
/// Of a context without a state.
const CONTEXT_BYTES: usize = 25;

const FORM_BYTES: usize = 55;
const SAMPLED: u8 = 1;

impl TraceId {
    /// None for all zeros, which means no trace.
    pub fn new(bytes: [u8; 16]) -> Option<Self> {
        (bytes != [0; 16]).then_some(Self(bytes))
    }

    /// For an event without a trace: every process derives the same id.
    pub fn of_event(event: EventId) -> Self {
        Self(event.0.into_bytes())
    }

    /// Whether this trace is sampled at a rate from 0 to 1. Every process decides the same.
    pub fn is_among(self, share: f64) -> bool {
        const RANDOM_BITS: u32 = 62;
        let mut low = [0; 8];
        low.copy_from_slice(&self.0[8..]);
        // An event id has two fixed bits here.
        let random = u64::from_be_bytes(low) & ((1 << RANDOM_BITS) - 1);
        (random as f64) < share * (1_u64 << RANDOM_BITS) as f64
    }
}

impl SpanId {
    pub fn new(bytes: [u8; 8]) -> Option<Self> {
        (bytes != [0; 8]).then_some(Self(bytes))
    }

    /// The span of a delivery's waiting time. Attempts name it as their parent, whichever process makes them.
    pub fn of_delivery(delivery: DeliveryId) -> Self {
        Self::derived(delivery, &[])
    }

    /// The span of an attempt, derived from what is stored about it, so that it can be shown later.
    pub fn of_attempt(delivery: DeliveryId, started_at_unix_us: i64) -> Self {
        Self::derived(delivery, &started_at_unix_us.to_be_bytes())
    }

    fn derived(delivery: DeliveryId, more: &[u8]) -> Self {
        let mut hash = Sha256::new();
        hash.update(delivery.event.0.as_bytes());
        hash.update(delivery.endpoint.0.to_be_bytes());
        hash.update(more);
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&hash.finalize()[..8]);
        Self::new(bytes).unwrap_or(Self([1; 8]))
    }
}

impl TraceContext {
    /// Parses a `traceparent`. A malformed one counts as none.
    pub fn parse(header: &str) -> Option<Self> {
        let header = header.trim();
        let form = header.get(..FORM_BYTES)?;
        let [version, trace, span, flags] = form.split('-').collect::<Vec<_>>().try_into().ok()?;
        if (version.len(), trace.len(), span.len()) != (2, 32, 16) {
            return None;
        }
        // Later versions may append more; version 00 has exactly this.
        let more = &header[FORM_BYTES..];
        let fits = match version {
            "ff" => false,
            "00" => more.is_empty(),
            _ => more.is_empty() || more.starts_with('-'),
        };
        byte(version).filter(|_| fits)?;
        Some(Self {
            trace: TraceId::new(bytes(trace)?)?,
            span: SpanId::new(bytes(span)?)?,
            sampled: byte(flags)? & SAMPLED != 0,
        })
    }

    /// The stored form: 25 bytes, followed by the state.
    pub fn to_bytes(self, state: Option<&TraceState>) -> Vec<u8> {
        let state = state.map(TraceState::as_str).unwrap_or_default();
        let mut bytes = Vec::with_capacity(CONTEXT_BYTES + state.len());
        bytes.extend(self.trace.0);
        bytes.extend(self.span.0);
        bytes.push(u8::from(self.sampled));
        bytes.extend(state.as_bytes());
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<(Self, Option<TraceState>)> {
        let (trace, rest) = bytes.split_first_chunk()?;
        let (span, rest) = rest.split_first_chunk()?;
        let (flags, state) = rest.split_first()?;
        let context = Self {
            trace: TraceId::new(*trace)?,
            span: SpanId::new(*span)?,
            sampled: flags & SAMPLED != 0,
        };
        let state = std::str::from_utf8(state).ok().and_then(TraceState::parse);
        Some((context, state))
    }
}

impl TraceState {
    /// Parses a `tracestate`: comma-separated `key=value` members. None if it is empty, longer than participants must
    /// propagate, or malformed in any part: then all of it is dropped.
    pub fn parse(header: &str) -> Option<Self> {
        let members: Vec<(&str, &str)> = header
            .split(',')
            .map(|member| member.trim_matches([' ', '\t']))
            .filter(|member| !member.is_empty())
            .map(|member| {
                member
                    .split_once('=')
                    .filter(|(key, value)| is_member(key, value))
            })
            .collect::<Option<_>>()?;
        let repeated = (1..members.len()).any(|at| members[..at].iter().any(|one| one.0 == members[at].0));
        if repeated || !(1..=STATE_MEMBERS_MAX).contains(&members.len()) {
            return None;
        }
        let members: Vec<String> = members
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let text = members.join(",");
        (text.len() <= STATE_CHARS_MAX).then_some(Self(text))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_member(key: &str, value: &str) -> bool {
    let is_in_key = |c: u8| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'*' | b'/' | b'@');
    let starts = key.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    let is_in_value = |c: u8| matches!(c, b' '..=b'~') && c != b'=';
    starts
        && key.len() <= STATE_PART_CHARS_MAX
        && key.bytes().all(is_in_key)
        && key.bytes().filter(|c| *c == b'@').count() <= 1
        && (1..=STATE_PART_CHARS_MAX).contains(&value.len())
        && value.bytes().all(is_in_value)
}

fn byte(text: &str) -> Option<u8> {
    bytes::<1>(text).map(|[byte]| byte)
}

/// Upper case is not allowed.
fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    HEXLOWER.decode(text.as_bytes()).ok()?.try_into().ok()
}

/// The header's value.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "00-{}-{}-{:02x}",
            self.trace,
            self.span,
            u8::from(self.sampled)
        )
    }
}

macro_rules! shown_in_hex {
    ($($name:ident),+) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&HEXLOWER.encode(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    )+};
}
shown_in_hex!(TraceId, SpanId);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EndpointId;
    use proptest::prelude::*;
    use uuid::Uuid;

    const HEADER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_reads_back() {
        let context = TraceContext::parse(HEADER).expect("of the form");
        assert!(context.sampled);
        assert_eq!(context.to_string(), HEADER);
        let bytes = context.to_bytes(None);
        assert_eq!(bytes.len(), CONTEXT_BYTES);
        assert_eq!(TraceContext::from_bytes(&bytes), Some((context, None)));
        let state = TraceState::parse("vendor=abc");
        let bytes = context.to_bytes(state.as_ref());
        assert_eq!(TraceContext::from_bytes(&bytes), Some((context, state)));
        let unsampled = HEADER.replace("-01", "-02");
        assert!(!TraceContext::parse(&unsampled).expect("of the form").sampled);
    }

    #[test]
    fn what_is_not_of_the_form_is_no_context() {
        let later = HEADER.replacen("00", "cc", 1);
        assert!(TraceContext::parse(&later).is_some(), "of a later version");
        assert!(TraceContext::parse(&format!("{later}-what-else")).is_some());
        for bad in [
            String::new(),
            HEADER.to_uppercase(),
            format!("{HEADER}-more"),
            format!("{later}more"),
            HEADER.replacen("00", "ff", 1),
            HEADER.replacen("00", "0x", 1),
            HEADER[..54].to_owned(),
            HEADER.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            HEADER.replace("b7ad6b7169203331", &"0".repeat(16)),
            HEADER.replace('-', "_"),
        ] {
            assert_eq!(TraceContext::parse(&bad), None, "{bad}");
        }
        assert_eq!(TraceContext::from_bytes(&[1; 24]), None);
        assert_eq!(TraceContext::from_bytes(&[0; 25]), None);
    }

    #[test]
    fn a_tracestate_is_taken_whole_or_not_at_all() {
        let read = |text: &str| TraceState::parse(text).map(|state| state.0);
        assert_eq!(read("a=1"), Some("a=1".to_owned()));
        assert_eq!(
            read(" rojo=00f0 ,\tcongo=t61rcWkgMzE, ,t1@sys=x y,").as_deref(),
            Some("rojo=00f0,congo=t61rcWkgMzE,t1@sys=x y")
        );
        let most: Vec<String> = (0..32).map(|n| format!("k{n}=v")).collect();
        assert!(read(&most.join(",")).is_some());
        let long = format!("a={}", "x".repeat(256));
        let longest = format!("{long},b={}", "y".repeat(251));
        assert_eq!(read(&longest).map(|text| text.len()), Some(512));
        for bad in [
            "",
            " , ",
            "a",
            "a=",
            "=b",
            "A=1",
            "a b=1",
            "a=1,a=2",
            "a=1=2",
            "a=\u{e9}",
            "a=\u{1}",
            "a@b@c=1",
            "a=1,broken",
            &format!("{},k32=v", most.join(",")),
            &format!("{longest}z"),
            &format!("{long}x"),
        ] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text: String, bytes: Vec<u8>) {
            let _ = TraceContext::parse(&text);
            let _ = TraceContext::from_bytes(&bytes);
            if let Some(state) = TraceState::parse(&text) {
                prop_assert_eq!(TraceState::parse(state.as_str()), Some(state));
            }
        }

        #[test]
        fn a_share_takes_about_that_many(trace: u128) {
            let id = TraceId(trace.to_be_bytes());
            prop_assert!(id.is_among(1.0) && !id.is_among(0.0));
        }
    }

    #[test]
    fn a_share_of_traces_is_about_that_many() {
        let ids = (0..1_000_u64).map(|n| {
            let mut bytes = [7; 16];
            let digest = Sha256::digest(n.to_be_bytes());
            bytes[8..].copy_from_slice(&digest[..8]);
            TraceId(bytes)
        });
        let taken = ids.filter(|id| id.is_among(0.25)).count();
        assert!((200..300).contains(&taken), "{taken}");
    }

    #[test]
    fn each_delivery_has_a_span_of_its_own() {
        let event = EventId(Uuid::from_u128(7));
        let of = |endpoint| {
            SpanId::of_delivery(DeliveryId {
                event,
                endpoint: EndpointId(endpoint),
            })
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }
}
