//! Verification of a request by its receiver.
//! Invariant: signatures are compared in constant time, over the raw body, and only after the header was strictly
//! parsed.

use std::fmt;

use data_encoding::{BASE64, HEXLOWER};
use ed25519_dalek::{Signature, VerifyingKey};
use subtle::ConstantTimeEq;

use super::{PUBLIC_KEY_PREFIX, Secret, hmac};

/// How far a signature's timestamp may be from the receiver's clock.
pub const TOLERANCE_SECONDS: i64 = 300;
/// Signatures checked in one header. At most three secrets are active at a time.
pub(super) const SIGNATURES_MAX: usize = 10;
const HEADER_BYTES_MAX: usize = 4096;

/// Why a request must not be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    #[error("the secret or key is empty or not valid for this format")]
    BadSecret,
    #[error("the signature header is malformed")]
    MalformedHeader,
    #[error("the timestamp differs from this machine's clock by more than five minutes")]
    OutsideTolerance,
    #[error("no signature matches: the secret is different, or the body was modified")]
    NoMatch,
}

/// Verifies `standard-ed25519` signatures. It is not secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

impl PublicKey {
    /// Parses `whpk_` and the base64 of 32 bytes.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = BASE64
            .decode(text.strip_prefix(PUBLIC_KEY_PREFIX)?.as_bytes())
            .ok()?;
        let key = VerifyingKey::from_bytes(bytes.as_slice().try_into().ok()?).ok()?;
        (!key.is_weak()).then_some(Self(key))
    }
}

impl From<VerifyingKey> for PublicKey {
    fn from(key: VerifyingKey) -> Self {
        Self(key)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PUBLIC_KEY_PREFIX}{}", BASE64.encode(self.0.as_bytes()))
    }
}

/// Checks a `t-v1` header against the raw body.
///
/// `secrets` are those the receiver accepts; one match is enough. `now_unix_seconds` is the receiver's clock.
/// The body must be the raw bytes: parsing and serializing it again changes it.
///
/// ```
/// use postrider_proto::signature::{verify, Secret};
/// # use postrider_proto::signature::{sign, SignatureFormat};
/// # let secret = Secret::new("whsec_8JJAkzPTdXlFXcGzIzvHsbLDQwVSbUTt");
/// # let header = sign(SignatureFormat::TV1, "evt_1", 1_700_000_000, b"{}", &[secret]);
/// let secret = Secret::new("whsec_8JJAkzPTdXlFXcGzIzvHsbLDQwVSbUTt");
/// verify(&header, b"{}", &[secret], 1_700_000_010)?;
/// # Ok::<(), postrider_proto::signature::VerifyError>(())
/// ```
pub fn verify(
    header: &str,
    body: &[u8],
    secrets: &[Secret],
    now_unix_seconds: i64,
) -> Result<(), VerifyError> {
    if secrets.is_empty() || secrets.iter().any(|secret| secret.0.is_empty()) {
        return Err(VerifyError::BadSecret);
    }
    let (t, signatures) = parse_t_v1(header).ok_or(VerifyError::MalformedHeader)?;
    check_time(t, now_unix_seconds)?;
    let matched = secrets.iter().any(|secret| {
        let expected = hmac(secret.0.as_bytes(), &[t.as_bytes(), b".", body]);
        signatures
            .iter()
            .any(|given| bool::from(given.as_slice().ct_eq(&expected)))
    });
    matched.then_some(()).ok_or(VerifyError::NoMatch)
}

/// Checks a request of format `standard`: `id`, `timestamp` and `header` are the values of `Webhook-Id`,
/// `Webhook-Timestamp` and `Webhook-Signature`. Otherwise like [`verify`].
///
/// ```
/// use postrider_proto::signature::{verify_standard, Secret};
/// # use postrider_proto::signature::{sign, SignatureFormat};
/// # let secret = Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
/// # let header = sign(SignatureFormat::Standard, "evt_1", 1_700_000_000, b"{}", &[secret]);
/// let secret = Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
/// verify_standard("evt_1", "1700000000", &header, b"{}", &[secret], 1_700_000_010)?;
/// # Ok::<(), postrider_proto::signature::VerifyError>(())
/// ```
pub fn verify_standard(
    id: &str,
    timestamp: &str,
    header: &str,
    body: &[u8],
    secrets: &[Secret],
    now_unix_seconds: i64,
) -> Result<(), VerifyError> {
    let keys: Option<Vec<Vec<u8>>> = secrets.iter().map(Secret::standard_key).collect();
    let keys = keys
        .filter(|keys| !keys.is_empty())
        .ok_or(VerifyError::BadSecret)?;
    let signatures: Vec<[u8; 32]> = parse_standard(id, timestamp, header, "v1")?;
    check_time(timestamp, now_unix_seconds)?;
    let parts = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body];
    let matched = keys.iter().any(|key| {
        let expected = hmac(key, &parts);
        signatures
            .iter()
            .any(|given| bool::from(given.as_slice().ct_eq(&expected)))
    });
    matched.then_some(()).ok_or(VerifyError::NoMatch)
}

/// Checks a request of format `standard-ed25519` with the endpoint's public keys. Otherwise like [`verify_standard`].
///
/// ```
/// use postrider_proto::signature::{verify_ed25519, PublicKey};
/// # use postrider_proto::signature::{sign, Secret, SignatureFormat};
/// # let secret = Secret::generate(SignatureFormat::StandardEd25519, &[7; 32]);
/// # let header = sign(SignatureFormat::StandardEd25519, "evt_1", 1_700_000_000, b"{}", &[secret]);
/// let key = PublicKey::parse("whpk_6kpsY+KcUgq+9VB7Ey7F+ZVHdq6+vnuSQh7qaRRG0iw=").expect("a key");
/// verify_ed25519("evt_1", "1700000000", &header, b"{}", &[key], 1_700_000_010)?;
/// # Ok::<(), postrider_proto::signature::VerifyError>(())
/// ```
pub fn verify_ed25519(
    id: &str,
    timestamp: &str,
    header: &str,
    body: &[u8],
    keys: &[PublicKey],
    now_unix_seconds: i64,
) -> Result<(), VerifyError> {
    if keys.is_empty() {
        return Err(VerifyError::BadSecret);
    }
    let signatures: Vec<[u8; 64]> = parse_standard(id, timestamp, header, "v1a")?;
    check_time(timestamp, now_unix_seconds)?;
    let content = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body].concat();
    let matched = signatures.iter().map(Signature::from_bytes).any(|given| {
        keys.iter()
            .any(|key| key.0.verify_strict(&content, &given).is_ok())
    });
    matched.then_some(()).ok_or(VerifyError::NoMatch)
}

fn check_time(t: &str, now_unix_seconds: i64) -> Result<(), VerifyError> {
    let seconds: i64 = t.parse().map_err(|_| VerifyError::MalformedHeader)?;
    if now_unix_seconds.abs_diff(seconds) > TOLERANCE_SECONDS as u64 {
        return Err(VerifyError::OutsideTolerance);
    }
    Ok(())
}

fn is_time(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// The timestamp as text, and the `v1` signatures. Other schemes are ignored.
fn parse_t_v1(header: &str) -> Option<(&str, Vec<[u8; 32]>)> {
    if header.len() > HEADER_BYTES_MAX {
        return None;
    }
    let mut time = None;
    let mut signatures = Vec::new();
    for part in header.split(',') {
        let (name, value) = part.split_once('=')?;
        match name {
            "t" => {
                let is_first = time.replace(value).is_none();
                if !is_first || !is_time(value) {
                    return None;
                }
            }
            "v1" => {
                let bytes = HEXLOWER.decode(value.as_bytes()).ok()?;
                signatures.push(bytes.try_into().ok()?);
            }
            _ => {}
        }
    }
    if signatures.is_empty() || signatures.len() > SIGNATURES_MAX {
        return None;
    }
    Some((time?, signatures))
}

/// The signatures of this version; others are ignored. An id contains no dot: the parts around one must not be
/// interchangeable.
fn parse_standard<const N: usize>(
    id: &str,
    timestamp: &str,
    header: &str,
    version: &str,
) -> Result<Vec<[u8; N]>, VerifyError> {
    let read = || {
        let fits = !id.is_empty()
            && !id.contains('.')
            && id.len() <= HEADER_BYTES_MAX
            && is_time(timestamp)
            && header.len() <= HEADER_BYTES_MAX;
        if !fits {
            return None;
        }
        let mut signatures = Vec::new();
        for part in header.split(' ') {
            let (name, value) = part.split_once(',')?;
            if name == version {
                let bytes = BASE64.decode(value.as_bytes()).ok()?;
                signatures.push(bytes.try_into().ok()?);
            }
        }
        (1..=SIGNATURES_MAX)
            .contains(&signatures.len())
            .then_some(signatures)
    };
    read().ok_or(VerifyError::MalformedHeader)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signature::{SignatureFormat, sign};
    use proptest::prelude::*;

    const NOW: i64 = 1_700_000_000;
    const BODY: &[u8] = br#"{"id":"evt_1"}"#;

    fn secret(n: u8) -> Secret {
        Secret::from_random(&[n; 32])
    }

    fn pair(n: u8) -> Secret {
        Secret::generate(SignatureFormat::StandardEd25519, &[n; 32])
    }

    fn public(n: u8) -> PublicKey {
        pair(n).public_key().expect("a pair")
    }

    fn signed(secrets: &[Secret]) -> String {
        sign(SignatureFormat::TV1, "evt_1", NOW, BODY, secrets)
    }

    /// One request in each format, verified with secret or key number `n`.
    #[derive(Clone)]
    struct Request {
        format: SignatureFormat,
        id: &'static str,
        t: String,
        header: String,
        body: &'static [u8],
    }

    impl Request {
        fn of(format: SignatureFormat, numbers: &[u8]) -> Self {
            let make = match format {
                SignatureFormat::StandardEd25519 => pair,
                SignatureFormat::TV1 | SignatureFormat::Standard => secret,
            };
            let secrets: Vec<Secret> = numbers.iter().map(|n| make(*n)).collect();
            Self {
                format,
                id: "evt_1",
                t: NOW.to_string(),
                header: sign(format, "evt_1", NOW, BODY, &secrets),
                body: BODY,
            }
        }

        fn check(&self, n: u8, now: i64) -> Result<(), VerifyError> {
            let Self {
                id, t, header, body, ..
            } = self;
            match self.format {
                SignatureFormat::TV1 => verify(header, body, &[secret(n)], now),
                SignatureFormat::Standard => verify_standard(id, t, header, body, &[secret(n)], now),
                SignatureFormat::StandardEd25519 => verify_ed25519(id, t, header, body, &[public(n)], now),
            }
        }
    }

    /// F5.
    #[test]
    fn either_secret_verifies_while_one_retires() {
        for format in SignatureFormat::ALL {
            let request = Request::of(*format, &[2, 1]);
            assert_eq!(request.check(1, NOW), Ok(()), "{format}");
            assert_eq!(request.check(2, NOW), Ok(()), "{format}");
            assert_eq!(request.check(3, NOW), Err(VerifyError::NoMatch), "{format}");
        }
    }

    /// F8.
    #[test]
    fn a_changed_body_id_or_time_does_not_verify() {
        for format in SignatureFormat::ALL {
            let request = Request::of(*format, &[1]);
            let changed = Request {
                body: b"{ }",
                ..request.clone()
            };
            assert_eq!(changed.check(1, NOW), Err(VerifyError::NoMatch), "{format}");
            let later = Request {
                t: (NOW + 1).to_string(),
                header: request.header.replace(&NOW.to_string(), &(NOW + 1).to_string()),
                ..request.clone()
            };
            assert_eq!(later.check(1, NOW), Err(VerifyError::NoMatch), "{format}");
            if *format != SignatureFormat::TV1 {
                let renamed = Request {
                    id: "evt_2",
                    ..request
                };
                assert_eq!(renamed.check(1, NOW), Err(VerifyError::NoMatch), "{format}");
            }
        }
    }

    /// F7.
    #[test]
    fn the_tolerance_is_five_minutes_on_both_sides() {
        for format in SignatureFormat::ALL {
            let request = Request::of(*format, &[1]);
            for (now, expected) in [
                (NOW + 300, Ok(())),
                (NOW - 300, Ok(())),
                (NOW + 301, Err(VerifyError::OutsideTolerance)),
                (NOW - 301, Err(VerifyError::OutsideTolerance)),
            ] {
                assert_eq!(request.check(1, now), expected, "{format} {now}");
            }
        }
    }

    /// F1, F2, F4, F6, and more than ten signatures (F5).
    #[test]
    fn malformed_t_v1_headers_are_refused() {
        let good = signed(&[secret(1)]);
        let hex = &good[good.len() - 64..];
        let many = format!("t={NOW}{}", format!(",v1={hex}").repeat(11));
        for bad in [
            "",
            "t",
            &format!("v1={hex}"),
            &format!("t={NOW}"),
            &format!("t={NOW},v1="),
            &format!("t={NOW},v1={}", &hex[..63]),
            &format!("t={NOW},v1={hex}00"),
            &format!("t={NOW},v0={hex}"),
            &format!("t={NOW},t={NOW},v1={hex}"),
            &format!("t=-{NOW},v1={hex}"),
            &format!("t=+{NOW},v1={hex}"),
            &format!("t=1e9,v1={hex}"),
            &format!("t=99999999999999999999,v1={hex}"),
            &many,
        ] {
            assert_eq!(
                verify(bad, BODY, &[secret(1)], NOW),
                Err(VerifyError::MalformedHeader),
                "{bad}"
            );
        }
    }

    #[test]
    fn malformed_standard_headers_are_refused() {
        for format in [SignatureFormat::Standard, SignatureFormat::StandardEd25519] {
            let good = Request::of(format, &[1]);
            let (version, signature) = good.header.split_once(',').expect("a version");
            let many = [good.header.as_str(); 11].join(" ");
            for bad in [
                "",
                version,
                &format!("{version},"),
                signature,
                &format!("{version},{}", &signature[4..]),
                &format!("{version},{}", signature.trim_end_matches('=')),
                &format!("v9,{signature}"),
                &format!("{} ", good.header),
                &many,
            ] {
                let request = Request {
                    header: bad.to_owned(),
                    ..good.clone()
                };
                assert_eq!(
                    request.check(1, NOW),
                    Err(VerifyError::MalformedHeader),
                    "{format} {bad:?}"
                );
            }
            for t in [
                "",
                "1e9",
                "-1",
                "+1700000000",
                " 1700000000",
                "99999999999999999999",
            ] {
                let request = Request {
                    t: t.to_owned(),
                    ..good.clone()
                };
                assert_eq!(request.check(1, NOW), Err(VerifyError::MalformedHeader), "{t:?}");
            }
            for id in ["", "evt.1"] {
                let request = Request { id, ..good.clone() };
                assert_eq!(request.check(1, NOW), Err(VerifyError::MalformedHeader), "{id:?}");
            }
        }
    }

    /// F3.
    #[test]
    fn an_empty_secret_never_verifies() {
        let empty = Secret::new("");
        let header = signed(std::slice::from_ref(&empty));
        assert_eq!(verify(&header, BODY, &[empty], NOW), Err(VerifyError::BadSecret));
        assert_eq!(verify(&header, BODY, &[], NOW), Err(VerifyError::BadSecret));
        let header = Request::of(SignatureFormat::Standard, &[1]).header;
        let time = NOW.to_string();
        for bad in [
            vec![],
            vec![Secret::new("")],
            vec![secret(1), Secret::new("whsec_short")],
        ] {
            assert_eq!(
                verify_standard("evt_1", &time, &header, BODY, &bad, NOW),
                Err(VerifyError::BadSecret)
            );
        }
    }

    #[test]
    fn keys_that_are_none_are_refused() {
        let weak = format!("whpk_{}", BASE64.encode(&[0; 32]));
        for bad in ["", "whpk_", "whsec_AAAA", &weak, &public(1).to_string()[5..]] {
            assert_eq!(PublicKey::parse(bad), None, "{bad}");
        }
        assert_eq!(PublicKey::parse(&public(1).to_string()), Some(public(1)));
    }

    proptest! {
        #[test]
        fn what_is_signed_verifies(body: Vec<u8>, key: [u8; 32], now in 0_i64..4_000_000_000) {
            let secret = [Secret::from_random(&key)];
            let header = sign(SignatureFormat::TV1, "e", now, &body, &secret);
            prop_assert_eq!(verify(&header, &body, &secret, now), Ok(()));
            let header = sign(SignatureFormat::Standard, "e", now, &body, &secret);
            prop_assert_eq!(verify_standard("e", &now.to_string(), &header, &body, &secret, now), Ok(()));
        }

        #[test]
        fn any_header_is_read_without_a_panic(header: String, tail in "t=[0-9]{0,12},v1=[0-9a-f]{0,70}") {
            let time = NOW.to_string();
            for header in [&header, &tail] {
                let _ = verify(header, BODY, &[secret(1)], NOW);
                let _ = verify_standard(header, &time, header, BODY, &[secret(1)], NOW);
                let _ = verify_ed25519(header, &time, header, BODY, &[public(1)], NOW);
            }
        }
    }
}
