//! The signature debugger: the exact bytes that were signed, the secret behind each signature of a header, and the
//! signatures that common mistakes produce.
//! Invariant: for pasted bytes it reports only whether a signature is valid and never the valid signature, so that users
//! who may not see secrets can't use it to sign.

use chrono::{DateTime, Utc};
use data_encoding::BASE64;
use postrider_dispatcher::vault::{Owner, Purpose, Vault};
use postrider_proto::signature::{Secret, SignatureFormat, TOLERANCE_SECONDS, sign};
use serde_json::Value;
use subtle::ConstantTimeEq;

use crate::{pages::stats_format::counted, tables::secrets::SecretRow};

/// The parts of a request that its signature covers.
pub(crate) struct Request<'a> {
    pub(crate) format: SignatureFormat,
    pub(crate) event_id: &'a str,
    pub(crate) unix_seconds: i64,
    pub(crate) body: &'a [u8],
}

/// A secret of the endpoint and the time it was active.
pub(crate) struct Known {
    secret: Secret,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) retires_at: Option<DateTime<Utc>>,
}

impl Known {
    /// Decrypts the secrets, newest first. Failures are skipped here; the dispatcher logs them when it signs.
    pub(crate) fn open(vault: &Vault, owner: Owner, rows: Vec<SecretRow>) -> Vec<Self> {
        rows.into_iter()
            .filter_map(|row| {
                let clear = vault.open(owner, Purpose::Secret, &row.ciphertext).ok()?;
                Some(Self {
                    secret: Secret::new(String::from_utf8(clear).ok()?),
                    created_at: row.created_at,
                    retires_at: row.retires_at,
                })
            })
            .collect()
    }

    pub(crate) fn state(&self, now: DateTime<Utc>) -> &'static str {
        match self.retires_at {
            None => "current",
            Some(at) if at > now => "retiring",
            Some(_) => "retired",
        }
    }

    /// The public key that receivers verify with, if the secret is a key pair.
    pub(crate) fn public_key(&self) -> Option<String> {
        self.secret.public_key().map(|key| key.to_string())
    }
}

impl Request<'_> {
    /// The bytes that are signed.
    pub(crate) fn content(&self) -> Vec<u8> {
        let prefix = match self.format {
            SignatureFormat::TV1 => format!("{}.", self.unix_seconds),
            _ => format!("{}.{}.", self.event_id, self.unix_seconds),
        };
        [prefix.as_bytes(), self.body].concat()
    }

    /// The bare signature, without the syntax of the header.
    fn signature(&self, secret: &Secret) -> Option<String> {
        let header = sign(
            self.format,
            self.event_id,
            self.unix_seconds,
            self.body,
            std::slice::from_ref(secret),
        );
        signatures(&header).into_iter().next()
    }

    /// The secret that this signature was made with.
    pub(crate) fn secret_of<'k>(&self, signature: &str, secrets: &'k [Known]) -> Option<&'k Known> {
        secrets.iter().find(|known| {
            let expected = self.signature(&known.secret).unwrap_or_default();
            // In constant time: otherwise a signature could be guessed byte by byte.
            !expected.is_empty() && bool::from(expected.as_bytes().ct_eq(signature.as_bytes()))
        })
    }

    /// Common mistakes, each with the signature it produces for this request.
    pub(crate) fn mistakes(&self, known: &Known) -> Vec<Mistake> {
        let with = |body: &[u8], unix_seconds: i64, secret: &Secret| {
            let request = Request {
                body,
                unix_seconds,
                ..*self
            };
            request.signature(secret).unwrap_or_default()
        };
        let mut found = Vec::new();
        let mut add = |title: &'static str, explanation: &'static str, signature: String| {
            if !signature.is_empty() {
                found.push(Mistake {
                    title,
                    explanation,
                    signature,
                });
            }
        };
        if let Ok(value) = serde_json::from_slice::<Value>(self.body) {
            let pretty = serde_json::to_vec_pretty(&value).unwrap_or_default();
            add(
                "The body was parsed and serialized again",
                "Whitespace, key order or number formatting changes, and a single byte is enough. Use the raw body, \
                 before any framework parses it.",
                with(&pretty, self.unix_seconds, &known.secret),
            );
        }
        let longer = [self.body, b"\n"].concat();
        add(
            "A newline was appended to the body",
            "Some editors, and echo in a shell, add one at the end.",
            with(&longer, self.unix_seconds, &known.secret),
        );
        let bare = Secret::new(known.secret.reveal().trim_start_matches("whsec_"));
        if self.format == SignatureFormat::TV1 {
            add(
                "The secret was used without its whsec_ prefix",
                "In this format the key is the whole secret string, including the prefix.",
                with(self.body, self.unix_seconds, &bare),
            );
            let other = Request {
                format: SignatureFormat::Standard,
                ..*self
            };
            add(
                "The signature was verified as Standard Webhooks",
                "That format also signs the event ID and base64-decodes the secret. This endpoint uses t-v1.",
                other.signature(&known.secret).unwrap_or_default(),
            );
        } else if self.format == SignatureFormat::Standard {
            let other = Request {
                format: SignatureFormat::TV1,
                ..*self
            };
            add(
                "The secret was not base64-decoded",
                "In this format the key is the decoded base64 after whsec_, and the event ID is signed as well.",
                other.signature(&known.secret).unwrap_or_default(),
            );
        }
        add(
            "The receiver's clock was used as the timestamp",
            "Use the timestamp from the header. The receiver's clock only serves to check that it is recent.",
            with(self.body, self.unix_seconds + 1, &known.secret),
        );
        found
    }

    /// Shell commands that compute or verify the signature. The secret comes from the environment.
    pub(crate) fn commands(&self, signature: &str, public_key: Option<&str>) -> Vec<Command> {
        // In base64, so that no shell can alter it.
        let content = BASE64.encode(&self.content());
        let set = "export WEBHOOK_SECRET='whsec_…'";
        match self.format {
            SignatureFormat::TV1 => vec![
                Command {
                    name: "openssl",
                    text: format!(
                        "{set}\necho {content} | base64 -d | openssl dgst -sha256 -hmac \"$WEBHOOK_SECRET\""
                    ),
                },
                Command {
                    name: "python",
                    text: format!(
                        "{set}\npython3 -c 'import base64, hashlib, hmac, os\n\
                         print(hmac.new(os.environ[\"WEBHOOK_SECRET\"].encode(), base64.b64decode(\"{content}\"), \
                         hashlib.sha256).hexdigest())'"
                    ),
                },
            ],
            SignatureFormat::Standard => vec![
                Command {
                    name: "openssl",
                    text: format!(
                        "{set}\nkey=$(printf %s \"${{WEBHOOK_SECRET#whsec_}}\" | base64 -d | od -An -v -tx1 | tr -d ' \\n')\n\
                         echo {content} | base64 -d | openssl dgst -sha256 -mac HMAC -macopt hexkey:$key -binary | base64"
                    ),
                },
                Command {
                    name: "python",
                    text: format!(
                        "{set}\npython3 -c 'import base64, hashlib, hmac, os\n\
                         key = base64.b64decode(os.environ[\"WEBHOOK_SECRET\"].removeprefix(\"whsec_\"))\n\
                         print(base64.b64encode(hmac.new(key, base64.b64decode(\"{content}\"), hashlib.sha256).digest()).decode())'"
                    ),
                },
            ],
            SignatureFormat::StandardEd25519 => {
                let key = public_key.unwrap_or("whpk_…").trim_start_matches("whpk_");
                vec![Command {
                    name: "openssl",
                    text: format!(
                        "{{ printf 'MCowBQYDK2VwAyEA' | base64 -d; echo {key} | base64 -d; }} > key.der\n\
                         echo {content} | base64 -d > signed\necho {signature} | base64 -d > signature\n\
                         openssl pkeyutl -verify -pubin -keyform DER -inkey key.der -rawin -in signed -sigfile signature"
                    ),
                }]
            }
        }
    }

    /// Checks a pasted header. The message names the likely cause if the signature is invalid.
    pub(crate) fn verdict(&self, header: &str, secrets: &[Known], now: DateTime<Utc>) -> Verdict {
        let given = signatures(header);
        if given.is_empty() {
            return Verdict::invalid(
                "The header contains no signature. Expected t=<unix>,v1=<hex> or v1,<base64>; it may have been truncated.",
            );
        }
        let signed_by = |body: &[u8]| {
            let request = Request { body, ..*self };
            given.iter().find_map(|one| request.secret_of(one, secrets))
        };
        if let Some(known) = signed_by(self.body) {
            let age = now.timestamp() - self.unix_seconds;
            let state = known.state(now);
            if state == "retired" {
                return Verdict::invalid(
                    "The signature matches the body, but it was made with a retired secret. Use the current secret.",
                );
            }
            if age.abs() > TOLERANCE_SECONDS {
                return Verdict {
                    is_valid: true,
                    message: format!(
                        "The signature is valid and was made with the {state} secret. Its timestamp is {} away from \
                         now, so a receiver with a tolerance of {TOLERANCE_SECONDS} seconds rejects the request.",
                        counted(age.abs(), "second", "seconds")
                    ),
                };
            }
            return Verdict {
                is_valid: true,
                message: format!("The signature is valid and was made with the {state} secret."),
            };
        }
        let trimmed = self.body.trim_ascii_end();
        if trimmed.len() != self.body.len() && signed_by(trimmed).is_some() {
            return Verdict::invalid(
                "The body ends with whitespace or newlines that were not sent. Without them, the signature is valid.",
            );
        }
        if let Ok(value) = serde_json::from_slice::<Value>(self.body)
            && signed_by(&serde_json::to_vec(&value).unwrap_or_default()).is_some()
        {
            return Verdict::invalid(
                "The body was parsed and serialized again. Without the added whitespace, the signature is valid.",
            );
        }
        Verdict::invalid(
            "No signature matches any secret of this endpoint. The body or the timestamp was modified, or the request \
             was signed for another endpoint.",
        )
    }
}

pub(crate) struct Mistake {
    pub(crate) title: &'static str,
    pub(crate) explanation: &'static str,
    pub(crate) signature: String,
}

pub(crate) struct Command {
    pub(crate) name: &'static str,
    pub(crate) text: String,
}

pub(crate) struct Verdict {
    pub(crate) is_valid: bool,
    pub(crate) message: String,
}

impl Verdict {
    fn invalid(message: &str) -> Self {
        Self {
            is_valid: false,
            message: message.to_owned(),
        }
    }
}

/// The signatures of a header, in order: `t=1,v1=ab,v1=cd`, `v1,AB v1,CD` or `v1a,…`.
pub(crate) fn signatures(header: &str) -> Vec<String> {
    const SIGNATURES_MAX: usize = 10;
    let one = |part: &str| {
        let value = ["v1=", "v1a,", "v1,"]
            .iter()
            .find_map(|prefix| part.strip_prefix(prefix))?;
        (!value.is_empty()).then(|| value.to_owned())
    };
    let parts: Vec<&str> = match header.contains("v1=") {
        true => header.split(',').collect(),
        false => header.split(' ').collect(),
    };
    parts
        .into_iter()
        .filter_map(|part| one(part.trim()))
        .take(SIGNATURES_MAX)
        .collect()
}

/// The timestamp in a `t-v1` header.
pub(crate) fn time_of(header: &str) -> Option<i64> {
    header
        .split(',')
        .find_map(|part| part.trim().strip_prefix("t="))?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] = br#"{"b":1,"a":[1, 2]}"#;
    const T: i64 = 1_700_000_000;

    fn known(format: SignatureFormat, n: u8, retires_at: Option<i64>) -> Known {
        let at = |t: i64| DateTime::from_timestamp(t, 0).expect("a time");
        Known {
            secret: Secret::generate(format, &[n; 32]),
            created_at: at(T - 1_000),
            retires_at: retires_at.map(at),
        }
    }

    fn request(format: SignatureFormat, body: &[u8]) -> Request<'_> {
        Request {
            format,
            event_id: "evt_1",
            unix_seconds: T,
            body,
        }
    }

    #[test]
    fn each_signature_is_matched_to_its_secret_in_every_format() {
        let now = DateTime::from_timestamp(T + 5, 0).expect("a time");
        for format in SignatureFormat::ALL.iter().copied() {
            let secrets = [known(format, 2, None), known(format, 1, Some(T + 60))];
            let clear: Vec<Secret> = secrets.iter().map(|one| one.secret.clone()).collect();
            let header = sign(format, "evt_1", T, BODY, &clear);
            let sent = request(format, BODY);
            let found = signatures(&header);
            assert_eq!(found.len(), 2, "{header}");
            let states: Vec<_> = found
                .iter()
                .map(|one| sent.secret_of(one, &secrets).map(|k| k.state(now)))
                .collect();
            assert_eq!(states, [Some("current"), Some("retiring")]);
            assert!(sent.secret_of("00", &secrets).is_none());

            assert!(sent.verdict(&header, &secrets, now).is_valid);
            let message = |body: &[u8]| request(format, body).verdict(&header, &secrets, now).message;
            assert!(message(br#"{"b":2}"#).starts_with("No signature matches"));
            assert!(message(&[BODY, b"\n"].concat()).contains("newlines"));
            assert!(!sent.verdict("t=1", &secrets, now).is_valid);
            let late = DateTime::from_timestamp(T + 100, 0).expect("a time");
            let retired = [known(format, 1, Some(T + 60))];
            assert!(sent.verdict(&header, &retired, late).message.contains("retired"));
        }
    }

    #[test]
    fn a_body_that_was_serialized_again_is_recognised() {
        let compact = br#"{"a":1}"#;
        let secrets = [known(SignatureFormat::TV1, 1, None)];
        let header = sign(
            SignatureFormat::TV1,
            "evt_1",
            T,
            compact,
            &[secrets[0].secret.clone()],
        );
        let now = DateTime::from_timestamp(T, 0).expect("a time");
        let verdict = request(SignatureFormat::TV1, br#"{ "a": 1 }"#).verdict(&header, &secrets, now);
        assert!(
            verdict.message.contains("serialized again"),
            "{}",
            verdict.message
        );
    }

    #[test]
    fn a_mistake_never_produces_the_valid_signature() {
        for format in SignatureFormat::ALL.iter().copied() {
            let known = known(format, 1, None);
            let sent = request(format, BODY);
            let valid = sent.signature(&known.secret).expect("a signature");
            let mistakes = sent.mistakes(&known);
            assert!(mistakes.len() >= 3, "{format}");
            for mistake in mistakes {
                assert_ne!(mistake.signature, valid, "{}", mistake.title);
            }
        }
    }

    #[test]
    fn a_command_never_contains_the_secret() {
        for format in SignatureFormat::ALL.iter().copied() {
            let known = known(format, 1, None);
            let public = known.public_key();
            for command in request(format, BODY).commands("sig", public.as_deref()) {
                let secret = known.secret.reveal();
                assert!(!command.text.contains(secret), "{}", command.text);
            }
        }
    }
}
