//! Signing and verifying, over the raw bytes of the body.
//!
//! `t-v1` is `t=<unix>,v1=<hex>[,v1=<hex>]` with HMAC-SHA256 over `<t>.<body>`; the key is the secret as it is given,
//! `whsec_` included, so that Stripe's libraries verify it. `standard` is Standard Webhooks 1.0.

use std::fmt;

use data_encoding::{BASE64, HEXLOWER};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

pub use crate::state::SignatureFormat;

/// How far a signature's time may lie from the receiver's clock.
pub const TOLERANCE_SECONDS: i64 = 300;
/// Signatures looked at in one header. Three secrets at most sign at a time.
const SIGNATURES_MAX: usize = 10;
const HEADER_BYTES_MAX: usize = 4096;
const SECRET_PREFIX: &str = "whsec_";

/// What signatures are made with. It does not show itself in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// `whsec_` and the base64 of these bytes. They must come from a secure source.
    pub fn from_random(bytes: &[u8; 32]) -> Self {
        Self(format!("{SECRET_PREFIX}{}", BASE64.encode(bytes)))
    }

    /// The secret itself, for the one who may see it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The key of the `standard` format: the bytes behind `whsec_`, 24 to 64 of them.
    fn standard_key(&self) -> Option<Vec<u8>> {
        let bytes = BASE64
            .decode(self.0.strip_prefix(SECRET_PREFIX)?.as_bytes())
            .ok()?;
        (24..=64).contains(&bytes.len()).then_some(bytes)
    }

    /// Whether signatures of this format can be made with it.
    pub fn fits(&self, format: SignatureFormat) -> bool {
        match format {
            SignatureFormat::TV1 => self.0.len() >= 24,
            SignatureFormat::Standard => self.standard_key().is_some(),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The value of `Webhook-Signature`. `secrets` are those in force, the newest first.
pub fn sign(
    format: SignatureFormat,
    event_id: &str,
    unix_seconds: i64,
    body: &[u8],
    secrets: &[Secret],
) -> String {
    let t = unix_seconds.to_string();
    let mut header = String::with_capacity(32 + 72 * secrets.len());
    match format {
        SignatureFormat::TV1 => {
            header.push_str("t=");
            header.push_str(&t);
            for secret in secrets {
                let mac = hmac(secret.0.as_bytes(), &[t.as_bytes(), b".", body]);
                header.push_str(",v1=");
                HEXLOWER.encode_append(&mac, &mut header);
            }
        }
        SignatureFormat::Standard => {
            for key in secrets.iter().filter_map(Secret::standard_key) {
                let parts = [event_id.as_bytes(), b".", t.as_bytes(), b".", body];
                if !header.is_empty() {
                    header.push(' ');
                }
                header.push_str("v1,");
                BASE64.encode_append(&hmac(&key, &parts), &mut header);
            }
        }
    }
    header
}

/// Why a request must not be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    #[error("the secret is empty or not of the form this format needs")]
    BadSecret,
    #[error("the signature header is malformed")]
    MalformedHeader,
    #[error("the timestamp is more than five minutes from this machine's clock")]
    OutsideTolerance,
    #[error("no signature matches: the secret is another one, or the body was changed")]
    NoMatch,
}

/// Checks a `t-v1` header against the raw body.
///
/// `secrets` are those the receiver accepts; one match is enough. `now_unix_seconds` is the receiver's clock.
/// The body must be the bytes as they came in: parsing and writing them again changes them.
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
    let seconds: i64 = t.parse().map_err(|_| VerifyError::MalformedHeader)?;
    if now_unix_seconds.abs_diff(seconds) > TOLERANCE_SECONDS as u64 {
        return Err(VerifyError::OutsideTolerance);
    }
    let matched = secrets.iter().any(|secret| {
        let expected = hmac(secret.0.as_bytes(), &[t.as_bytes(), b".", body]);
        signatures
            .iter()
            .any(|given| bool::from(given.as_slice().ct_eq(&expected)))
    });
    if matched {
        Ok(())
    } else {
        Err(VerifyError::NoMatch)
    }
}

/// The timestamp as it stands, and the `v1` signatures. Other schemes are passed over.
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
                let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
                if !digits || time.replace(value).is_some() {
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

fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = match Hmac::<Sha256>::new_from_slice(key) {
        Ok(mac) => mac,
        Err(_) => unreachable!("HMAC takes a key of any length"),
    };
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: i64 = 1_700_000_000;
    const BODY: &[u8] = br#"{"id":"evt_1"}"#;

    fn secret(n: u8) -> Secret {
        Secret::from_random(&[n; 32])
    }

    fn signed(secrets: &[Secret]) -> String {
        sign(SignatureFormat::TV1, "evt_1", NOW, BODY, secrets)
    }

    #[test]
    fn either_secret_verifies_while_one_retires() {
        let header = signed(&[secret(2), secret(1)]);
        assert_eq!(verify(&header, BODY, &[secret(1)], NOW), Ok(()));
        assert_eq!(verify(&header, BODY, &[secret(2)], NOW), Ok(()));
        assert_eq!(
            verify(&header, BODY, &[secret(3)], NOW),
            Err(VerifyError::NoMatch)
        );
    }

    #[test]
    fn a_changed_body_and_a_changed_time_do_not_verify() {
        let header = signed(&[secret(1)]);
        assert_eq!(
            verify(&header, b"{ }", &[secret(1)], NOW),
            Err(VerifyError::NoMatch)
        );
        let later = header.replace(&NOW.to_string(), &(NOW + 1).to_string());
        assert_eq!(verify(&later, BODY, &[secret(1)], NOW), Err(VerifyError::NoMatch));
    }

    #[test]
    fn the_tolerance_is_five_minutes_on_both_sides() {
        let header = signed(&[secret(1)]);
        for (now, expected) in [
            (NOW + 300, Ok(())),
            (NOW - 300, Ok(())),
            (NOW + 301, Err(VerifyError::OutsideTolerance)),
            (NOW - 301, Err(VerifyError::OutsideTolerance)),
        ] {
            assert_eq!(verify(&header, BODY, &[secret(1)], now), expected, "{now}");
        }
    }

    #[test]
    fn malformed_headers_are_refused() {
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
    fn an_empty_secret_never_verifies() {
        let empty = Secret::new("");
        let header = signed(std::slice::from_ref(&empty));
        assert_eq!(verify(&header, BODY, &[empty], NOW), Err(VerifyError::BadSecret));
        assert_eq!(verify(&header, BODY, &[], NOW), Err(VerifyError::BadSecret));
    }

    #[test]
    fn the_standard_example_comes_out_right() {
        // The example of the Standard Webhooks specification's own libraries.
        let secret = Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
        let body = br#"{"test": 2432232314}"#;
        assert_eq!(
            sign(
                SignatureFormat::Standard,
                "msg_p5jXN8AQM9LWM0D4loKWxJek",
                1_614_265_330,
                body,
                &[secret]
            ),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
    }

    proptest! {
        #[test]
        fn what_is_signed_verifies(body: Vec<u8>, key: [u8; 32], now in 0_i64..4_000_000_000) {
            let secret = Secret::from_random(&key);
            let header = sign(SignatureFormat::TV1, "e", now, &body, std::slice::from_ref(&secret));
            prop_assert_eq!(verify(&header, &body, &[secret], now), Ok(()));
        }

        #[test]
        fn any_header_is_read_without_a_panic(header: String, tail in "t=[0-9]{0,12},v1=[0-9a-f]{0,70}") {
            let _ = verify(&header, BODY, &[secret(1)], NOW);
            let _ = verify(&tail, BODY, &[secret(1)], NOW);
        }
    }
}
