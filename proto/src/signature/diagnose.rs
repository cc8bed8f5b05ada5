//! Explains why a captured request does not verify. Used by `postrider verify` and by the signature debugger.
//! Invariant: signatures are compared by the functions a receiver uses, and a finding never contains a secret or a valid
//! signature.

use std::fmt;

use serde_json::Value;

use super::{
    PRIVATE_KEY_PREFIX, PUBLIC_KEY_PREFIX, PublicKey, SECRET_PREFIX, Secret, SignatureFormat,
    TOLERANCE_SECONDS, VerifyError, sign, verify, verify::SIGNATURES_MAX, verify_ed25519, verify_standard,
};
use crate::json;

/// A request as it was captured: three header values, empty if missing, and the raw body.
#[derive(Debug, Clone, Copy)]
pub struct Captured<'a> {
    pub id: &'a str,
    pub timestamp: &'a str,
    pub signature: &'a str,
    pub body: &'a [u8],
}

/// The result of a diagnosis. The text explains it to the receiver's developer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// Made with this secret of the list. The age is negative if the timestamp is in the future.
    Valid {
        secret: usize,
        age_seconds: i64,
    },
    MissingSignature,
    MissingTimestamp,
    Malformed(String),
    /// Number of a secret of the list that can't be used for signatures of this format.
    UnsuitableSecret(usize),
    /// Valid for a body that differs from this one in a recognizable way.
    BodyChanged(BodyChange),
    NotJson,
    /// The body belongs to the event with this id.
    OtherEvent(String),
    NoMatch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyChange {
    TrailingNewline,
    SurroundingWhitespace,
    LineEndings,
    Reserialized,
}

/// A mistake in a receiver's code that produces a wrong signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    Reserialized,
    AppendedNewline,
    PrefixRemoved,
    VerifiedAsStandard,
    NotDecoded,
    OwnClock,
}

impl Finding {
    /// Whether a receiver with the matching secret accepts it.
    pub fn is_accepted(&self) -> bool {
        matches!(self, Self::Valid { age_seconds, .. } if age_seconds.abs() <= TOLERANCE_SECONDS)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Valid { age_seconds: age, .. } if *age > TOLERANCE_SECONDS => write!(
                f,
                "The signature is valid, but it is {age} seconds old; receivers accept at most {TOLERANCE_SECONDS}. The \
                 request is a replay of an old one, or the receiver's clock is ahead."
            ),
            Self::Valid { age_seconds: age, .. } if -*age > TOLERANCE_SECONDS => write!(
                f,
                "The signature is valid, but its timestamp is {} seconds in the future; receivers accept at most \
                 {TOLERANCE_SECONDS}. The receiver's clock is behind, or the sender's is ahead.",
                -age
            ),
            Self::Valid { .. } => f.write_str("The signature is valid."),
            Self::MissingSignature => f.write_str(
                "The Webhook-Signature header is missing: the request was not signed, or the capture dropped the header.",
            ),
            Self::MissingTimestamp => f.write_str(
                "The timestamp is missing: it is in Webhook-Timestamp, or in Webhook-Signature as t=<unix seconds>.",
            ),
            Self::Malformed(header) => write!(
                f,
                "The Webhook-Signature header is malformed: `{header}`. Expected `t=<unix seconds>,v1=<64 hex digits>`, or \
                 `v1,<base64>` or `v1a,<base64>` with Webhook-Id and Webhook-Timestamp. It may have been truncated."
            ),
            Self::UnsuitableSecret(number) => write!(
                f,
                "Secret {number} does not match the signature format: `v1,…` requires a secret of whsec_ and base64, `v1a,…` the \
                 endpoint's public key, whpk_ and base64."
            ),
            Self::BodyChanged(change) => {
                write!(f, "The body was changed: the signature matches {}.", change.undone())
            }
            Self::NotJson => f.write_str(
                "The body was changed or truncated: it is not valid JSON, and every body sent is.",
            ),
            Self::OtherEvent(id) => write!(
                f,
                "The body belongs to another request: its id is `{id}`, which differs from Webhook-Id."
            ),
            Self::NoMatch => f.write_str(
                "No signature matches. Either the secret is wrong (of another endpoint or tenant, or replaced since), or the \
                 body or the timestamp was changed in transit: verify the raw bytes as received, not JSON that was parsed \
                 and serialized again.",
            ),
        }
    }
}

impl BodyChange {
    const fn undone(self) -> &'static str {
        match self {
            Self::TrailingNewline => "without the trailing newline, which the capture added",
            Self::SurroundingWhitespace => "without the surrounding whitespace, which was added",
            Self::LineEndings => "with \\r\\n line endings replaced by \\n",
            Self::Reserialized => {
                "without the whitespace between tokens: the JSON was parsed and serialized again"
            }
        }
    }
}

/// The bodies that may have become this one, each with the change.
fn originals(body: &[u8]) -> Vec<(BodyChange, String)> {
    let text = String::from_utf8_lossy(body);
    let mut originals = vec![
        (
            BodyChange::TrailingNewline,
            text.trim_end_matches(['\r', '\n']).to_owned(),
        ),
        (BodyChange::SurroundingWhitespace, text.trim_ascii().to_owned()),
        (
            BodyChange::SurroundingWhitespace,
            text.trim_ascii_end().to_owned(),
        ),
        (BodyChange::LineEndings, text.replace("\r\n", "\n")),
        (BodyChange::Reserialized, json::compact(&text)),
    ];
    let value: Option<Value> = serde_json::from_slice(body).ok();
    originals.extend(value.map(|value| (BodyChange::Reserialized, value.to_string())));
    originals
}

impl<'a> Captured<'a> {
    /// Checks the request with each secret, or public key for ed25519, as of the receiver's clock.
    pub fn diagnose(&self, secrets: &[Secret], now_unix_seconds: i64) -> Finding {
        if self.signature.is_empty() {
            return Finding::MissingSignature;
        }
        let malformed = || Finding::Malformed(self.signature.to_owned());
        let signed_at = match self.time() {
            "" => return Finding::MissingTimestamp,
            text => match text.parse() {
                Ok(signed_at) => signed_at,
                Err(_) => return malformed(),
            },
        };
        // At the time of signing: the age is a finding of its own.
        let checked: Vec<_> = secrets
            .iter()
            .map(|secret| self.check(secret, signed_at))
            .collect();
        let position = |wanted| checked.iter().position(|result| *result == wanted);
        if let Some(secret) = position(Ok(())) {
            return Finding::Valid {
                secret,
                age_seconds: now_unix_seconds - signed_at,
            };
        }
        if position(Err(VerifyError::MalformedHeader)).is_some() {
            return malformed();
        }
        if let Some(secret) = position(Err(VerifyError::BadSecret)) {
            return Finding::UnsuitableSecret(secret + 1);
        }
        // A wrong secret and a changed body look the same, but some common changes can be recognized.
        let matches = |(_, body): &(BodyChange, String)| {
            let body = body.as_bytes();
            let original = Captured { body, ..*self };
            let mut checked = secrets.iter().map(|secret| original.check(secret, signed_at));
            checked.any(|result| result.is_ok())
        };
        if let Some((change, _)) = originals(self.body).into_iter().find(matches) {
            return Finding::BodyChanged(change);
        }
        let Ok(body) = serde_json::from_slice::<Value>(self.body) else {
            return Finding::NotJson;
        };
        match body["id"].as_str() {
            Some(id) if !self.id.is_empty() && id != self.id => Finding::OtherEvent(id.to_owned()),
            _ => Finding::NoMatch,
        }
    }

    fn check(&self, secret: &Secret, now_unix_seconds: i64) -> Result<(), VerifyError> {
        let Self {
            id,
            timestamp,
            signature,
            body,
        } = *self;
        let secrets = std::slice::from_ref(secret);
        match self.format() {
            SignatureFormat::StandardEd25519 => {
                let key = PublicKey::parse(&secret.0)
                    .or_else(|| secret.public_key())
                    .ok_or(VerifyError::BadSecret)?;
                verify_ed25519(id, timestamp, signature, body, &[key], now_unix_seconds)
            }
            SignatureFormat::Standard => {
                verify_standard(id, timestamp, signature, body, secrets, now_unix_seconds)
            }
            SignatureFormat::TV1
                if [PRIVATE_KEY_PREFIX, PUBLIC_KEY_PREFIX]
                    .iter()
                    .any(|prefix| secret.0.starts_with(prefix)) =>
            {
                Err(VerifyError::BadSecret)
            }
            SignatureFormat::TV1 => verify(signature, body, secrets, now_unix_seconds),
        }
    }

    /// By the form of the header.
    pub fn format(&self) -> SignatureFormat {
        if self.signature.starts_with("v1a,") {
            SignatureFormat::StandardEd25519
        } else if self.signature.starts_with("v1,") {
            SignatureFormat::Standard
        } else {
            SignatureFormat::TV1
        }
    }

    /// The signed timestamp, as text.
    fn time(&self) -> &'a str {
        self.signature
            .split(',')
            .find_map(|part| part.strip_prefix("t="))
            .unwrap_or(self.timestamp)
    }

    /// What the body is appended to before it is signed.
    pub fn signed_prefix(&self) -> String {
        match self.format() {
            SignatureFormat::TV1 => format!("{}.", self.time()),
            SignatureFormat::Standard | SignatureFormat::StandardEd25519 => {
                format!("{}.{}.", self.id, self.time())
            }
        }
    }

    /// The signatures of the header, without its syntax.
    pub fn signatures(&self) -> Vec<&'a str> {
        signatures(self.signature)
    }

    /// The secret of the list that made this one signature of the header.
    pub fn secret_of(&self, signature: &str, secrets: &[Secret]) -> Option<usize> {
        let header = match self.format() {
            SignatureFormat::TV1 => format!("t={},v1={signature}", self.time()),
            SignatureFormat::Standard => format!("v1,{signature}"),
            SignatureFormat::StandardEd25519 => format!("v1a,{signature}"),
        };
        let alone = Captured {
            signature: &header,
            ..*self
        };
        let signed_at = self.time().parse().ok()?;
        secrets
            .iter()
            .position(|secret| alone.check(secret, signed_at).is_ok())
    }

    /// Common mistakes, each with the signature it produces for this request.
    pub fn mistakes(&self, secret: &Secret) -> Vec<(Mistake, String)> {
        let format = self.format();
        let Ok(t) = self.time().parse::<i64>() else {
            return Vec::new();
        };
        let signed = |format, t, body: &[u8], secret: &Secret| {
            sign(format, self.id, t, body, std::slice::from_ref(secret))
        };
        let mut found = Vec::new();
        if let Ok(value) = serde_json::from_slice::<Value>(self.body) {
            let pretty = serde_json::to_vec_pretty(&value).unwrap_or_default();
            found.push((Mistake::Reserialized, signed(format, t, &pretty, secret)));
        }
        let longer = [self.body, b"\n"].concat();
        found.push((Mistake::AppendedNewline, signed(format, t, &longer, secret)));
        match format {
            SignatureFormat::TV1 => {
                let bare = Secret::new(secret.0.trim_start_matches(SECRET_PREFIX));
                found.push((Mistake::PrefixRemoved, signed(format, t, self.body, &bare)));
                let standard = signed(SignatureFormat::Standard, t, self.body, secret);
                found.push((Mistake::VerifiedAsStandard, standard));
            }
            SignatureFormat::Standard => {
                let plain = signed(SignatureFormat::TV1, t, self.body, secret);
                found.push((Mistake::NotDecoded, plain));
            }
            SignatureFormat::StandardEd25519 => {}
        }
        found.push((Mistake::OwnClock, signed(format, t + 1, self.body, secret)));
        found
            .into_iter()
            .filter_map(|(mistake, header)| Some((mistake, signatures(&header).first()?.to_string())))
            .collect()
    }
}

/// The signatures of a header, in order: `t=1,v1=ab,v1=cd`, `v1,AB v1,CD` or `v1a,…`.
fn signatures(header: &str) -> Vec<&str> {
    let separator = if header.contains("v1=") { ',' } else { ' ' };
    header
        .split(separator)
        .filter_map(|part| {
            ["v1=", "v1a,", "v1,"]
                .iter()
                .find_map(|prefix| part.trim().strip_prefix(prefix))
        })
        .filter(|signature| !signature.is_empty())
        .take(SIGNATURES_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_700_000_000;
    const T: &str = "1700000000";
    const BODY: &[u8] = b"{\"a\":\n1}";

    fn secret(format: SignatureFormat, n: u8) -> Secret {
        Secret::generate(format, &[n; 32])
    }

    /// What a receiver has.
    fn known(format: SignatureFormat, n: u8) -> Secret {
        let secret = secret(format, n);
        match secret.public_key() {
            Some(key) => Secret::new(key.to_string()),
            None => secret,
        }
    }

    fn header(format: SignatureFormat, body: &[u8], signers: &[u8]) -> String {
        let secrets: Vec<Secret> = signers.iter().map(|n| secret(format, *n)).collect();
        sign(format, "evt_1", NOW, body, &secrets)
    }

    fn captured<'a>(signature: &'a str, body: &'a [u8]) -> Captured<'a> {
        Captured {
            id: "evt_1",
            timestamp: T,
            signature,
            body,
        }
    }

    #[test]
    fn each_fault_is_recognized_in_every_format() {
        let valid = |secret, age_seconds| Finding::Valid { secret, age_seconds };
        for format in SignatureFormat::ALL.iter().copied() {
            let [new, old, other] = [1, 2, 3].map(|n| known(format, n));
            let one = header(format, BODY, &[1]);
            let two = header(format, BODY, &[1, 2]);
            let cut = &one[..one.len() - 3];
            for (signature, body, secrets, now, expected) in [
                (one.as_str(), BODY, vec![&new], NOW, valid(0, 0)),
                (&two, BODY, vec![&new, &old], NOW, valid(0, 0)),
                (&one, BODY, vec![&other, &new], NOW, valid(1, 0)),
                (&one, BODY, vec![&new], NOW + 301, valid(0, 301)),
                (&one, BODY, vec![&new], NOW - 301, valid(0, -301)),
                (&one, BODY, vec![&other], NOW, Finding::NoMatch),
                (&one, b"{\"a\":2}", vec![&new], NOW, Finding::NoMatch),
                (
                    &one,
                    b"{\"a\":\n1}\n",
                    vec![&new],
                    NOW,
                    Finding::BodyChanged(BodyChange::TrailingNewline),
                ),
                (
                    &one,
                    b" {\"a\":\n1} ",
                    vec![&new],
                    NOW,
                    Finding::BodyChanged(BodyChange::SurroundingWhitespace),
                ),
                (
                    &one,
                    b"{\"a\":\r\n1}",
                    vec![&new],
                    NOW,
                    Finding::BodyChanged(BodyChange::LineEndings),
                ),
                (&one, b"{\"a\":", vec![&new], NOW, Finding::NotJson),
                (
                    &one,
                    b"{\"id\":\"evt_2\"}",
                    vec![&new],
                    NOW,
                    Finding::OtherEvent("evt_2".to_owned()),
                ),
                (cut, BODY, vec![&new], NOW, Finding::Malformed(cut.to_owned())),
                ("", BODY, vec![&new], NOW, Finding::MissingSignature),
            ] {
                let secrets: Vec<Secret> = secrets.into_iter().cloned().collect();
                let found = captured(signature, body).diagnose(&secrets, now);
                assert_eq!(found, expected, "{format} {signature}");
                assert!(!found.to_string().contains(&new.0), "a secret is not printed");
                assert_eq!(
                    found.is_accepted(),
                    matches!(found, Finding::Valid { age_seconds: 0, .. })
                );
            }
        }
    }

    #[test]
    fn a_secret_of_another_format_is_named() {
        let standard = header(SignatureFormat::Standard, BODY, &[1]);
        let t_v1 = header(SignatureFormat::TV1, BODY, &[1]);
        let pair = known(SignatureFormat::StandardEd25519, 1);
        for (signature, secret) in [(&standard, Secret::new("no-prefix")), (&t_v1, pair)] {
            let found = captured(signature, BODY).diagnose(&[secret], NOW);
            assert_eq!(found, Finding::UnsuitableSecret(1));
        }
    }

    #[test]
    fn a_missing_timestamp_is_named() {
        let standard = header(SignatureFormat::Standard, BODY, &[1]);
        for signature in [standard.as_str(), "v1=ab"] {
            let request = Captured {
                timestamp: "",
                ..captured(signature, BODY)
            };
            assert_eq!(request.diagnose(&[], NOW), Finding::MissingTimestamp);
        }
    }

    #[test]
    fn a_body_that_was_serialized_again_is_recognized() {
        let format = SignatureFormat::TV1;
        let pretty = br#"{ "id": "evt_1",
                           "a": "b \" c" }"#;
        // As sent, and with the members in another order.
        for sent in [r#"{"id":"evt_1","a":"b \" c"}"#, r#"{"a":"b \" c","id":"evt_1"}"#] {
            let header = header(format, sent.as_bytes(), &[1]);
            assert_eq!(
                captured(&header, pretty).diagnose(&[known(format, 1)], NOW),
                Finding::BodyChanged(BodyChange::Reserialized)
            );
        }
    }

    #[test]
    fn each_signature_is_matched_to_its_secret() {
        for format in SignatureFormat::ALL.iter().copied() {
            let header = header(format, BODY, &[2, 1]);
            let request = captured(&header, BODY);
            let secrets = [secret(format, 3), secret(format, 1), secret(format, 2)];
            let found: Vec<_> = request.signatures();
            assert_eq!(found.len(), 2, "{header}");
            let made: Vec<_> = found.iter().map(|one| request.secret_of(one, &secrets)).collect();
            assert_eq!(made, [Some(2), Some(1)]);
            assert_eq!(request.secret_of("00", &secrets), None);
        }
        assert!(captured("t=1", BODY).signatures().is_empty());
    }

    #[test]
    fn a_mistake_never_produces_the_valid_signature() {
        for format in SignatureFormat::ALL.iter().copied() {
            let header = header(format, BODY, &[1]);
            let request = captured(&header, BODY);
            let valid = request.signatures()[0];
            let mistakes = request.mistakes(&secret(format, 1));
            assert!(mistakes.len() >= 3, "{format}");
            for (mistake, signature) in mistakes {
                assert_ne!(signature, valid, "{mistake:?}");
            }
        }
    }
}
