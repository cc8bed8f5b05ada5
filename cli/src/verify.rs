//! `verify`: checks the signature of a captured request and explains why it fails.
//! Invariant: secrets come from the environment or a file, never from the arguments, and are never printed.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, bail};
use chrono::Utc;
use clap::Args;
use postrider_proto::signature::{
    PublicKey, Secret, TOLERANCE_SECONDS, VerifyError, verify, verify_ed25519, verify_standard,
};

use crate::{
    reach::Failure,
    settings::{ENDPOINT_SECRET, Environment},
};

/// The secrets are read from POSTRIDER_ENDPOINT_SECRET, or from the file that POSTRIDER_ENDPOINT_SECRET_FILE names: the
/// current one first, then older ones, separated by commas. For standard-ed25519 they are public keys (whpk_…).
#[derive(Args)]
pub struct VerifyArguments {
    /// File with the request headers as received, one `Name: value` per line
    #[arg(long)]
    headers: PathBuf,
    /// File with the raw body as received
    #[arg(long)]
    body: PathBuf,
    /// When the request was received, as a Unix timestamp [default: now]
    #[arg(long)]
    at: Option<i64>,
    /// Output JSON
    #[arg(long)]
    json: bool,
}

/// Status 0 when the signature is valid and made with the current secret, 1 when it is not, 2 when it was not checked.
pub(crate) fn run(arguments: &VerifyArguments, environment: &Environment) -> Result<ExitCode, Failure> {
    check(arguments, environment).map_err(|error| Failure {
        error,
        json: arguments.json,
        usage: true,
    })
}

#[expect(clippy::disallowed_methods, reason = "a tool on the user's machine")]
fn check(arguments: &VerifyArguments, environment: &Environment) -> anyhow::Result<ExitCode> {
    let variable = ENDPOINT_SECRET.variable;
    let secrets = environment
        .secret(&ENDPOINT_SECRET)?
        .with_context(|| format!("no endpoint secret: set {variable} or {variable}_FILE"))?;
    let secrets: Vec<&str> = secrets
        .split([',', '\n'])
        .map(str::trim)
        .filter(|s| !s.is_empty())
        .collect();
    let headers = std::fs::read_to_string(&arguments.headers)
        .with_context(|| format!("cannot read {}", arguments.headers.display()))?;
    let body = std::fs::read(&arguments.body)
        .with_context(|| format!("cannot read {}", arguments.body.display()))?;
    if secrets.is_empty() {
        bail!("{variable} is empty");
    }
    let request = Request::read(&headers, body);
    let finding = request.examine(&secrets, arguments.at.unwrap_or_else(|| Utc::now().timestamp()));
    if arguments.json {
        println!(
            "{}",
            serde_json::json!({"verified": finding.good, "detail": finding.words})
        );
    } else {
        println!("{}", finding.words);
    }
    Ok(if finding.good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

struct Request {
    id: String,
    timestamp: String,
    signature: Option<String>,
    body: Vec<u8>,
}

struct Finding {
    good: bool,
    words: String,
}

impl Finding {
    fn bad(words: impl Into<String>) -> Self {
        Self {
            good: false,
            words: words.into(),
        }
    }
}

impl Request {
    fn read(headers: &str, body: Vec<u8>) -> Self {
        let value = |wanted: &str| {
            headers.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.trim()
                    .eq_ignore_ascii_case(wanted)
                    .then(|| value.trim().to_owned())
            })
        };
        Self {
            id: value("webhook-id").unwrap_or_default(),
            timestamp: value("webhook-timestamp").unwrap_or_default(),
            signature: value("webhook-signature"),
            body,
        }
    }

    /// With one secret, or one public key where the header is of that kind.
    fn check(&self, secret: &str, body: &[u8], now: i64) -> Result<(), VerifyError> {
        let header = self.signature.as_deref().unwrap_or_default();
        let secrets = [Secret::new(secret)];
        if header.starts_with("v1a,") {
            let key = PublicKey::parse(secret).ok_or(VerifyError::BadSecret)?;
            verify_ed25519(&self.id, &self.timestamp, header, body, &[key], now)
        } else if header.starts_with("v1,") {
            verify_standard(&self.id, &self.timestamp, header, body, &secrets, now)
        } else {
            verify(header, body, &secrets, now)
        }
    }

    /// The signed timestamp.
    fn signed_at(&self) -> Option<i64> {
        let header = self.signature.as_deref()?;
        let t = header.split(',').find_map(|part| part.strip_prefix("t="));
        t.unwrap_or(&self.timestamp).parse().ok()
    }

    fn examine(&self, secrets: &[&str], now: i64) -> Finding {
        let Some(header) = self.signature.as_deref() else {
            return Finding::bad(
                "The Webhook-Signature header is missing: the request was not signed, or the capture dropped the header.",
            );
        };
        let checked: Vec<_> = secrets
            .iter()
            .map(|secret| self.check(secret, &self.body, now))
            .collect();
        if let Some(number) = checked
            .iter()
            .position(|result| *result == Err(VerifyError::BadSecret))
        {
            return Finding::bad(format!(
                "Secret {} does not match the signature format: `v1,…` requires a secret of whsec_ and base64, `v1a,…` \
                 the endpoint's public key, whpk_ and base64.",
                number + 1
            ));
        }
        let signed_at = match self.signed_at() {
            Some(at) if checked[0] != Err(VerifyError::MalformedHeader) => at,
            _ => {
                return Finding::bad(format!(
                    "The Webhook-Signature header is malformed: `{header}`. Expected `t=<unix seconds>,v1=<64 hex digits>`, \
                     or `v1,<base64>` or `v1a,<base64>` with Webhook-Id and Webhook-Timestamp. It may have been truncated."
                ));
            }
        };
        // Whether it was valid at the time of signing.
        let matching = secrets
            .iter()
            .position(|secret| self.check(secret, &self.body, signed_at).is_ok());
        let Some(number) = matching else {
            return Finding::bad(self.no_match(secrets, signed_at));
        };
        let age = now - signed_at;
        if age > TOLERANCE_SECONDS {
            return Finding::bad(format!(
                "The signature is valid, but it is {age} seconds old; receivers accept at most {TOLERANCE_SECONDS}. The \
                 request is a replay of an old one, or the receiver's clock is ahead. (Use `--at` to set the time it was \
                 received.)"
            ));
        }
        if -age > TOLERANCE_SECONDS {
            return Finding::bad(format!(
                "The signature is valid, but its timestamp is {} seconds in the future; receivers accept at most \
                 {TOLERANCE_SECONDS}. The receiver's clock is behind, or the sender's is ahead. (Use `--at` to set the time \
                 it was received.)",
                -age
            ));
        }
        if number > 0 {
            return Finding::bad(format!(
                "Signed with secret {} of the list, not with the first: that secret is retiring or has retired. A \
                 receiver that only has the current secret rejects it.",
                number + 1
            ));
        }
        Finding {
            good: true,
            words: "The signature is valid: made with the current secret over this body, and recent enough."
                .to_owned(),
        }
    }

    /// A wrong secret and a changed body look the same, but some common changes can be recognised.
    fn no_match(&self, secrets: &[&str], signed_at: i64) -> String {
        let changes: [(&str, Vec<u8>); 4] = [
            (
                "without the trailing newline, which the capture added",
                without_line_end(&self.body).to_vec(),
            ),
            (
                "without the surrounding whitespace, which was added",
                self.body.trim_ascii().to_vec(),
            ),
            (
                "with \\r\\n line endings replaced by \\n",
                replace_line_ends(&self.body),
            ),
            (
                "without the whitespace between tokens: the JSON was parsed and serialised again",
                without_spaces(&self.body),
            ),
        ];
        for (how, body) in changes {
            if secrets
                .iter()
                .any(|secret| self.check(secret, &body, signed_at).is_ok())
            {
                return format!("The body was changed: the signature matches {how}.");
            }
        }
        match serde_json::from_slice::<serde_json::Value>(&self.body) {
            Err(_) => {
                return format!(
                    "The body was changed or truncated: these {} bytes are not valid JSON, and every body sent is.",
                    self.body.len()
                );
            }
            Ok(body) => {
                let id = body["id"]
                    .as_str()
                    .filter(|id| !self.id.is_empty() && *id != self.id);
                if let Some(id) = id {
                    return format!(
                        "The body belongs to another request: its id is `{id}`, but Webhook-Id is `{}`.",
                        self.id
                    );
                }
            }
        }
        format!(
            "No signature matches. Either the secret is wrong (of another endpoint or tenant, or replaced since), or the \
             body ({} bytes) or the timestamp was changed in transit: verify the raw bytes as received, not JSON that \
             was parsed and serialised again.",
            self.body.len()
        )
    }
}

fn without_line_end(body: &[u8]) -> &[u8] {
    let end = body.iter().rposition(|b| !matches!(b, b'\r' | b'\n'));
    &body[..end.map_or(0, |last| last + 1)]
}

/// Without whitespace outside of strings.
fn without_spaces(body: &[u8]) -> Vec<u8> {
    let (mut in_string, mut escaped) = (false, false);
    let mut kept = Vec::with_capacity(body.len());
    for byte in body.iter().copied() {
        if in_string || !byte.is_ascii_whitespace() {
            kept.push(byte);
        }
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ => {}
        }
    }
    kept
}

fn replace_line_ends(body: &[u8]) -> Vec<u8> {
    let is_extra = |index: usize| body[index] == b'\r' && body.get(index + 1) == Some(&b'\n');
    (0..body.len())
        .filter(|index| !is_extra(*index))
        .map(|index| body[index])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_proto::signature::{SignatureFormat, sign};

    const NOW: i64 = 1_700_000_000;
    const BODY: &[u8] = b"{\"a\":\n1}";

    fn secret(format: SignatureFormat, n: u8) -> Secret {
        Secret::generate(format, &[n; 32])
    }

    /// What a receiver has.
    fn held(format: SignatureFormat, n: u8) -> String {
        let secret = secret(format, n);
        secret
            .public_key()
            .map_or_else(|| secret.reveal().to_owned(), |key| key.to_string())
    }

    fn headers(format: SignatureFormat, signers: &[u8]) -> String {
        let secrets: Vec<Secret> = signers.iter().map(|n| secret(format, *n)).collect();
        let signature = sign(format, "evt_1", NOW, BODY, &secrets);
        format!(
            "Host: x\r\nWebhook-Id: evt_1\r\nwebhook-timestamp: {NOW}\r\nWebhook-Signature: {signature}\r\n"
        )
    }

    fn told(headers: &str, body: &[u8], secrets: &[&str], now: i64) -> (bool, String) {
        let finding = Request::read(headers, body.to_vec()).examine(secrets, now);
        (finding.good, finding.words)
    }

    #[test]
    fn each_fault_is_named_in_every_format() {
        for format in SignatureFormat::ALL.iter().copied() {
            let [new, old, other] = [1, 2, 3].map(|n| held(format, n));
            let (new, old, other) = (new.as_str(), old.as_str(), other.as_str());
            let good = headers(format, &[1]);
            let cut = &good[..good.trim_end().len() - 3];
            let bare = good.split("Webhook-Signature").next().unwrap_or_default();
            for (headers, body, secrets, now, words) in [
                (
                    good.as_str(),
                    BODY,
                    vec![new],
                    NOW,
                    "The signature is valid: made with the current",
                ),
                (
                    &headers(format, &[1, 2]),
                    BODY,
                    vec![new, old],
                    NOW,
                    "The signature is valid: made with the current",
                ),
                (&good, BODY, vec![other], NOW, "No signature matches"),
                (&good, b"{\"a\":2}", vec![new], NOW, "No signature matches"),
                (
                    &good,
                    b"{\"a\":\n1}\n",
                    vec![new],
                    NOW,
                    "The body was changed: the signature matches without the trailing newline",
                ),
                (
                    &good,
                    b"{\"a\":\n1} ",
                    vec![new],
                    NOW,
                    "The body was changed: the signature matches without the surrounding whitespace",
                ),
                (
                    &good,
                    b"{\"a\":",
                    vec![new],
                    NOW,
                    "The body was changed or truncated: these 5 bytes are not valid JSON",
                ),
                (
                    &good,
                    b"{\"id\":\"evt_2\"}",
                    vec![new],
                    NOW,
                    "The body belongs to another request: its id is `evt_2`, but Webhook-Id is `evt_1`",
                ),
                (
                    &good,
                    b"{\"a\":\r\n1}",
                    vec![new],
                    NOW,
                    "The body was changed: the signature matches with",
                ),
                (
                    &good,
                    BODY,
                    vec![new],
                    NOW + 301,
                    "The signature is valid, but it is 301 seconds old",
                ),
                (
                    &good,
                    BODY,
                    vec![new],
                    NOW - 301,
                    "The signature is valid, but its timestamp is 301 seconds in the future",
                ),
                (
                    &good,
                    BODY,
                    vec![other, new],
                    NOW,
                    "Signed with secret 2 of the list",
                ),
                (
                    cut,
                    BODY,
                    vec![new],
                    NOW,
                    "The Webhook-Signature header is malformed",
                ),
                (
                    bare,
                    BODY,
                    vec![new],
                    NOW,
                    "The Webhook-Signature header is missing",
                ),
            ] {
                let (is_good, told) = told(headers, body, &secrets, now);
                assert!(told.starts_with(words), "{format}: {told}, not {words}");
                assert_eq!(is_good, words.ends_with("the current"), "{told}");
                assert!(!told.contains(new), "a secret is not printed");
            }
        }
        let standard = headers(SignatureFormat::Standard, &[1]);
        let (_, words) = told(&standard, BODY, &["no-prefix"], NOW);
        assert!(
            words.starts_with("Secret 1 does not match the signature format"),
            "{words}"
        );
    }

    #[test]
    fn a_body_that_was_serialised_again_is_told_from_another_secret() {
        let format = SignatureFormat::TV1;
        let sent = br#"{"id":"evt_1","a":"b \" c"}"#;
        let signature = sign(format, "evt_1", NOW, sent, &[secret(format, 1)]);
        let headers = format!("Webhook-Id: evt_1\nWebhook-Signature: {signature}\n");
        let pretty = br#"{ "id": "evt_1",
                           "a": "b \" c" }"#;
        let (_, words) = told(&headers, pretty, &[&held(format, 1)], NOW);
        assert!(words.contains("parsed and serialised again"), "{words}");
        let (_, words) = told(&headers, sent, &[&held(format, 2)], NOW);
        assert!(
            words.starts_with("No signature matches. Either the secret"),
            "{words}"
        );
    }
}
