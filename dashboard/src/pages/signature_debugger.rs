//! Renders what `signature::diagnose` finds out about a request, and commands that recompute its signature.
//! Invariant: for pasted bytes it reports only whether a signature is valid and never the valid signature, so that users
//! who may not see secrets can't use it to sign.

use chrono::{DateTime, Utc};
use data_encoding::BASE64;
use postrider_dispatcher::vault::{Owner, Purpose, Vault};
use postrider_proto::signature::{
    Secret, SignatureFormat, TOLERANCE_SECONDS,
    diagnose::{self, Captured, Finding},
};

use crate::{pages::stats_format::counted, tables::secrets::SecretRow};

/// The endpoint's secrets, newest first, and when each was active.
pub(crate) struct Known {
    pub(crate) secrets: Vec<Secret>,
    lives: Vec<Life>,
}

#[derive(Clone, Copy)]
pub(crate) struct Life {
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) retires_at: Option<DateTime<Utc>>,
}

impl Known {
    /// Decrypts the secrets that can be used for a format, if one is given. Failures are skipped here; the dispatcher logs
    /// them when it signs.
    pub(crate) fn open(
        vault: &Vault,
        owner: Owner,
        rows: Vec<SecretRow>,
        format: Option<SignatureFormat>,
    ) -> Self {
        let (secrets, lives) = rows
            .into_iter()
            .filter_map(|row| {
                let clear = vault.open(owner, Purpose::Secret, &row.ciphertext).ok()?;
                let secret = Secret::new(String::from_utf8(clear).ok()?);
                let life = Life {
                    created_at: row.created_at,
                    retires_at: row.retires_at,
                };
                format
                    .is_none_or(|format| secret.fits(format))
                    .then_some((secret, life))
            })
            .unzip();
        Self { secrets, lives }
    }

    /// When the secret that made a signature was active.
    pub(crate) fn life_of(&self, request: &Captured<'_>, signature: &str) -> Option<Life> {
        let secret = request.secret_of(signature, &self.secrets)?;
        self.lives.get(secret).copied()
    }
}

impl Life {
    pub(crate) fn state(self, now: DateTime<Utc>) -> &'static str {
        match self.retires_at {
            None => "current",
            Some(at) if at > now => "retiring",
            Some(_) => "retired",
        }
    }
}

pub(crate) struct Mistake {
    pub(crate) title: &'static str,
    pub(crate) explanation: &'static str,
    pub(crate) signature: String,
}

/// Common mistakes, each with the signature it produces for this request.
pub(crate) fn mistakes(request: &Captured<'_>, secret: &Secret) -> Vec<Mistake> {
    let described = request.mistakes(secret).into_iter().map(|(mistake, signature)| {
        let (title, explanation) = describe(mistake);
        Mistake {
            title,
            explanation,
            signature,
        }
    });
    described.collect()
}

fn describe(mistake: diagnose::Mistake) -> (&'static str, &'static str) {
    use diagnose::Mistake::*;
    match mistake {
        Reserialized => (
            "The body was parsed and serialized again",
            "Whitespace, key order or number formatting changes, and a single byte is enough. Use the raw body, before any \
             framework parses it.",
        ),
        AppendedNewline => (
            "A newline was appended to the body",
            "Some editors, and echo in a shell, add one at the end.",
        ),
        PrefixRemoved => (
            "The secret was used without its whsec_ prefix",
            "In this format the key is the whole secret string, including the prefix.",
        ),
        VerifiedAsStandard => (
            "The signature was verified as Standard Webhooks",
            "That format also signs the event ID and base64-decodes the secret. This endpoint uses t-v1.",
        ),
        NotDecoded => (
            "The secret was not base64-decoded",
            "In this format the key is the decoded base64 after whsec_, and the event ID is signed as well.",
        ),
        OwnClock => (
            "The receiver's clock was used as the timestamp",
            "Use the timestamp from the header. The receiver's clock is only used to check that it is recent.",
        ),
    }
}

pub(crate) struct Command {
    pub(crate) name: &'static str,
    pub(crate) text: String,
}

/// Shell commands that compute or verify the signature. The secret comes from the environment.
pub(crate) fn commands(request: &Captured<'_>, secret: Option<&Secret>) -> Vec<Command> {
    // In base64, so that no shell can alter it.
    let content = BASE64.encode(&[request.signed_prefix().as_bytes(), request.body].concat());
    let set = "export WEBHOOK_SECRET='whsec_…'";
    match request.format() {
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
            let key = secret.and_then(Secret::public_key);
            let key = key.map_or("…".to_owned(), |key| key.to_string());
            let key = key.trim_start_matches("whpk_");
            let signature = request.signatures().first().copied().unwrap_or_default();
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

pub(crate) struct Verdict {
    pub(crate) is_valid: bool,
    pub(crate) message: String,
}

/// Checks a pasted request. The message names the likely cause if the signature is invalid.
pub(crate) fn verdict(
    request: &Captured<'_>,
    format: SignatureFormat,
    known: &Known,
    now: DateTime<Utc>,
) -> Verdict {
    let finding = request.diagnose(&known.secrets, now.timestamp());
    let (is_valid, message) = match &finding {
        Finding::Valid { secret, age_seconds } => {
            match known.lives.get(*secret).map_or("unknown", |life| life.state(now)) {
                "retired" => (
                    false,
                    "The signature matches the body, but it was made with a retired secret. Use the current secret."
                        .to_owned(),
                ),
                state if finding.is_accepted() => (
                    true,
                    format!("The signature is valid and was made with the {state} secret."),
                ),
                state => (
                    true,
                    format!(
                        "The signature is valid and was made with the {state} secret. Its timestamp is {} away from now, \
                         so a receiver with a tolerance of {TOLERANCE_SECONDS} seconds rejects the request.",
                        counted(age_seconds.abs(), "second", "seconds")
                    ),
                ),
            }
        }
        Finding::UnsuitableSecret(_) => (
            false,
            format!("The signature is not in this endpoint's format, {format}."),
        ),
        other => (false, other.to_string()),
    };
    Verdict { is_valid, message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_proto::signature::sign;

    const BODY: &[u8] = br#"{"a":1}"#;
    const T: i64 = 1_700_000_000;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).expect("a time")
    }

    fn known(format: SignatureFormat, retires_at: Option<i64>) -> Known {
        Known {
            secrets: vec![Secret::generate(format, &[1; 32])],
            lives: vec![Life {
                created_at: at(T - 1_000),
                retires_at: retires_at.map(at),
            }],
        }
    }

    #[test]
    fn a_verdict_names_the_state_of_the_secret_and_the_age() {
        for format in SignatureFormat::ALL.iter().copied() {
            let time = T.to_string();
            let current = known(format, None);
            let header = sign(format, "evt_1", T, BODY, &current.secrets);
            let request = Captured {
                id: "evt_1",
                timestamp: &time,
                signature: &header,
                body: BODY,
            };
            let life = current.life_of(&request, request.signatures()[0]);
            assert_eq!(life.expect("its own").state(at(T)), "current");
            let retired = known(format, Some(T + 60));
            for (known, now, is_valid, text) in [
                (&current, T + 5, true, "made with the current secret."),
                (&current, T + 301, true, "301 seconds away from now"),
                (&retired, T + 5, true, "made with the retiring secret."),
                (&retired, T + 100, false, "made with a retired secret"),
            ] {
                let verdict = verdict(&request, format, known, at(now));
                assert_eq!(verdict.is_valid, is_valid, "{}", verdict.message);
                assert!(verdict.message.contains(text), "{}", verdict.message);
            }
            let changed = Captured {
                body: br#"{"a":2}"#,
                ..request
            };
            let verdict = verdict(&changed, format, &current, at(T));
            assert!(verdict.message.starts_with("No signature matches"));
        }
    }

    #[test]
    fn a_command_never_contains_the_secret() {
        for format in SignatureFormat::ALL.iter().copied() {
            let known = known(format, None);
            let header = sign(format, "evt_1", T, BODY, &known.secrets);
            let request = Captured {
                id: "evt_1",
                timestamp: "1700000000",
                signature: &header,
                body: BODY,
            };
            for command in commands(&request, known.secrets.first()) {
                assert!(
                    !command.text.contains(known.secrets[0].reveal()),
                    "{}",
                    command.text
                );
            }
        }
    }
}
