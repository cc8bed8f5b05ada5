//! Properties that hold for arbitrary input. Each function panics if one does not. Fuzz targets run them
//! continuously, `tests/it/properties.rs` briefly.

use std::{net::IpAddr, time::Duration};

use http::HeaderValue;
use postrider_dispatcher::{
    guard::{Guard, is_public},
    http::client,
};
use postrider_proto::{
    filter::Filter,
    limits::{EVENT_DATA_BYTES_MAX, RETRY_AFTER_SECONDS_MAX, URL_BYTES_MAX},
    signature::{PublicKey, Secret, verify, verify_ed25519, verify_standard},
};
use url::{Host, Url};

/// Nothing that was not signed verifies, and nothing makes the parser panic.
pub(crate) fn signature_headers(input: &[u8]) {
    const NOW: i64 = 1_700_000_000;
    let text = String::from_utf8_lossy(input);
    let secrets = [Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")];
    // A valid form around the input gets further than noise alone.
    for header in [
        text.as_ref(),
        &format!("t={NOW},v1={text}"),
        &format!("t={text},v1={}", "ab".repeat(32)),
    ] {
        assert!(verify(header, b"{}", &secrets, NOW).is_err(), "{header:?}");
    }
    for header in [text.as_ref(), &format!("v1,{text}")] {
        assert!(verify_standard("evt_1", "1700000000", header, b"{}", &secrets, NOW).is_err());
        assert!(verify_standard(&text, &text, header, b"{}", &secrets, NOW).is_err());
    }
    let keys: Vec<PublicKey> = PublicKey::parse("whpk_6kpsY+KcUgq+9VB7Ey7F+ZVHdq6+vnuSQh7qaRRG0iw=")
        .into_iter()
        .collect();
    assert!(verify_ed25519("evt_1", "1700000000", &format!("v1a,{text}"), b"{}", &keys, NOW).is_err());
    let _ = PublicKey::parse(&text);
}

/// An accepted URL can be called: plain, complete, and to a public address or a name that may be one.
pub(crate) fn urls(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let guard = Guard {
        allow_http: true,
        ..Guard::default()
    };
    for text in [
        text.as_ref(),
        &format!("https://{text}/"),
        &format!("http://{text}:8080/a?b"),
        &format!("http://[{text}]/"),
    ] {
        let Ok(url) = guard.check_url(text) else { continue };
        assert!(text.len() <= URL_BYTES_MAX);
        assert!(matches!(url.scheme(), "http" | "https"), "{text:?}");
        assert!(url.username().is_empty() && url.password().is_none(), "{text:?}");
        assert!(url.fragment().is_none(), "{text:?}");
        match url.host() {
            Some(Host::Ipv4(ip)) => assert!(is_public(ip.into()), "{text:?}"),
            Some(Host::Ipv6(ip)) => assert!(is_public(ip.into()), "{text:?}"),
            Some(Host::Domain(name)) => {
                assert!(name.contains('.') && name.len() <= 254, "{text:?}");
                assert!(name.parse::<IpAddr>().is_err(), "{text:?}");
            }
            None => panic!("{text:?} has no host"),
        }
        // Stored and parsed again it is unchanged, and judged the same.
        assert_eq!(Url::parse(url.as_str()).as_ref(), Ok(&url), "{text:?}");
        assert!(guard.check_target(&url).is_ok(), "{text:?}");
    }
}

/// No address is public in one spelling and private in another.
pub(crate) fn addresses(input: &[u8]) {
    let Some(bytes) = input.first_chunk::<16>() else {
        return;
    };
    let six = IpAddr::from(*bytes);
    let guard = Guard::default();
    let verdict = is_public(six);
    assert_eq!(guard.allows(six), verdict);
    let url = format!("https://[{six}]/");
    assert_eq!(guard.check_url(&url).is_ok(), verdict, "{url}");
    let [a, b, c, d, ..] = *bytes;
    let four = std::net::Ipv4Addr::new(a, b, c, d);
    let verdict = is_public(four.into());
    for spelling in [
        format!("https://{four}/"),
        format!("https://{}/", u32::from(four)),
        format!("https://{:#x}/", u32::from(four)),
        format!("https://{a}.{}/", u32::from_be_bytes([0, b, c, d])),
        format!("https://[::ffff:{four}]/"),
        format!("https://[64:ff9b::{four}]/"),
    ] {
        assert_eq!(guard.check_url(&spelling).is_ok(), verdict, "{spelling}");
    }
}

/// A filter is parsed or rejected, and a parsed one evaluates on any data.
pub(crate) fn filters(input: &[u8]) {
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(input) else {
        return;
    };
    let Ok(filter) = Filter::read(&value) else { return };
    for data in [
        value.clone(),
        serde_json::Value::Null,
        serde_json::json!({"a": [value, {"b": 1e300}]}),
    ] {
        let first = filter.admits(&data);
        assert_eq!(first, filter.admits(&data));
    }
}

/// Whatever an endpoint requests, the delay is at most a day.
pub(crate) fn retry_after(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let date = format!("Fri, 31 Dec {text} 23:59:59 GMT");
    for value in [HeaderValue::from_bytes(input), HeaderValue::from_str(&date)]
        .into_iter()
        .flatten()
    {
        if let Some(wait) = client::retry_after(&value) {
            assert!(wait <= Duration::from_secs(RETRY_AFTER_SECONDS_MAX), "{value:?}");
        }
    }
}

/// An accepted event has data that is a JSON object within its limits, stored byte for byte.
pub(crate) fn emit_bodies(input: &[u8]) {
    let whole = postrider_dashboard::read_emit_body(input);
    let text = String::from_utf8_lossy(input);
    let framed = format!(r#"{{"type":"a","data":{text}}}"#);
    for (body, taken) in [
        (input, whole),
        (
            framed.as_bytes(),
            postrider_dashboard::read_emit_body(framed.as_bytes()),
        ),
    ] {
        let Ok(data) = taken else { continue };
        assert!(data.len() <= EVENT_DATA_BYTES_MAX);
        assert!(!data.contains('\0'));
        let value: serde_json::Value = serde_json::from_str(&data).expect("JSON");
        assert!(value.is_object(), "{data}");
        let body = std::str::from_utf8(body).expect("UTF-8");
        assert!(body.contains(&data), "the body contains the data");
    }
}
