//! A signature taken apart: the very bytes that were signed, each signature of the header with the secret that made it,
//! and what a receiver gets who does it wrong.
//! Invariant: for bytes that somebody pastes, only whether a signature is right comes out and never the right one: this
//! must not sign for whoever may look but not see secrets.

use chrono::{DateTime, Utc};
use data_encoding::BASE64;
use postrider_dispatcher::vault::{Owner, Purpose, Vault};
use postrider_proto::signature::{Secret, SignatureFormat, TOLERANCE_SECONDS, sign};
use serde_json::Value;
use subtle::ConstantTimeEq;

use crate::tables::secrets::SecretRow;

/// What is signed and sent, as it is known here.
pub(crate) struct Request<'a> {
    pub(crate) format: SignatureFormat,
    pub(crate) event_id: &'a str,
    pub(crate) unix_seconds: i64,
    pub(crate) body: &'a [u8],
}

/// A secret of the endpoint, with when it signed.
pub(crate) struct Known {
    secret: Secret,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) retires_at: Option<DateTime<Utc>>,
}

impl Known {
    /// Those that open, the newest first. One that does not is logged where it is used to sign.
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

    /// What its receiver verifies with, when it is a key pair: no secret.
    pub(crate) fn public_key(&self) -> Option<String> {
        self.secret.public_key().map(|key| key.to_string())
    }
}

impl Request<'_> {
    /// The bytes that the signature is over.
    pub(crate) fn content(&self) -> Vec<u8> {
        let before = match self.format {
            SignatureFormat::TV1 => format!("{}.", self.unix_seconds),
            _ => format!("{}.{}.", self.event_id, self.unix_seconds),
        };
        [before.as_bytes(), self.body].concat()
    }

    /// The signature alone, without what stands around it in the header.
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

    /// Which of the secrets made this signature.
    pub(crate) fn maker<'k>(&self, signature: &str, secrets: &'k [Known]) -> Option<&'k Known> {
        secrets.iter().find(|known| {
            let made = self.signature(&known.secret).unwrap_or_default();
            // In constant time: a signature could be guessed bit by bit otherwise.
            !made.is_empty() && bool::from(made.as_bytes().ct_eq(signature.as_bytes()))
        })
    }

    /// The usual mistakes, each with what it makes of this request under the secret.
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
        let mut add = |what: &'static str, why: &'static str, made: String| {
            if !made.is_empty() {
                found.push(Mistake { what, why, made });
            }
        };
        if let Ok(value) = serde_json::from_slice::<Value>(self.body) {
            let pretty = serde_json::to_vec_pretty(&value).unwrap_or_default();
            add(
                "The body was parsed and written again",
                "Spaces, the order of keys and the way numbers are written change, and one byte is enough. Take the raw \
                 body before any framework parses it.",
                with(&pretty, self.unix_seconds, &known.secret),
            );
        }
        let longer = [self.body, b"\n"].concat();
        add(
            "A line end was added to the body",
            "Some editors, and echo in a shell, put one at the end.",
            with(&longer, self.unix_seconds, &known.secret),
        );
        let bare = Secret::new(known.secret.reveal().trim_start_matches("whsec_"));
        if self.format == SignatureFormat::TV1 {
            add(
                "The secret was used without whsec_",
                "In this format the key is the secret as it is shown, prefix and all.",
                with(self.body, self.unix_seconds, &bare),
            );
            let other = Request {
                format: SignatureFormat::Standard,
                ..*self
            };
            add(
                "It was checked as Standard Webhooks",
                "That format signs the id too and decodes the secret. This endpoint's format is t-v1.",
                other.signature(&known.secret).unwrap_or_default(),
            );
        } else if self.format == SignatureFormat::Standard {
            let other = Request {
                format: SignatureFormat::TV1,
                ..*self
            };
            add(
                "The secret was not decoded",
                "In this format the key is the bytes whose base64 stands behind whsec_, and the id is signed too.",
                other.signature(&known.secret).unwrap_or_default(),
            );
        }
        add(
            "The receiver's own time was used",
            "Sign with the time of the header. The receiver's clock is only for asking whether that is recent.",
            with(self.body, self.unix_seconds + 1, &known.secret),
        );
        found
    }

    /// A command that makes the signature, or checks it. The secret comes from the environment.
    pub(crate) fn commands(&self, signature: &str, public_key: Option<&str>) -> Vec<Command> {
        let before = match self.format {
            SignatureFormat::TV1 => format!("{}.", self.unix_seconds),
            _ => format!("{}.{}.", self.event_id, self.unix_seconds),
        };
        // In base64, so that no shell can change a byte of it.
        let content = BASE64.encode(&[before.as_bytes(), self.body].concat());
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

    /// What to say of a pasted header: in words, and whether a receiver would take it at that time.
    pub(crate) fn verdict(&self, header: &str, secrets: &[Known], now: DateTime<Utc>) -> Verdict {
        let given = signatures(header);
        if given.is_empty() {
            return Verdict::bad(
                "The header has no signature in it. It is t=<unix>,v1=<hex> or v1,<base64>: perhaps it was cut off.",
            );
        }
        let made = |body: &[u8]| {
            let request = Request { body, ..*self };
            given.iter().find_map(|one| request.maker(one, secrets))
        };
        if let Some(known) = made(self.body) {
            let age = now.timestamp() - self.unix_seconds;
            let state = known.state(now);
            if state == "retired" {
                return Verdict::bad(
                    "The bytes are right, but the secret that made it has retired. Fetch the current one.",
                );
            }
            if age.abs() > TOLERANCE_SECONDS {
                return Verdict {
                    good: true,
                    words: format!(
                        "The signature is right and made with the {state} secret. It is {} s old: a receiver that asks \
                         for at most {TOLERANCE_SECONDS} s refuses it by now, as it should.",
                        age.abs()
                    ),
                };
            }
            return Verdict {
                good: true,
                words: format!("The signature is right and made with the {state} secret."),
            };
        }
        let trimmed = self.body.trim_ascii_end();
        if trimmed.len() != self.body.len() && made(trimmed).is_some() {
            return Verdict::bad(
                "The body has spaces or line ends at its end that were not sent. Without them it is right.",
            );
        }
        if let Ok(value) = serde_json::from_slice::<Value>(self.body)
            && made(&serde_json::to_vec(&value).unwrap_or_default()).is_some()
        {
            return Verdict::bad(
                "The body was parsed and written again: written without spaces it is right.",
            );
        }
        Verdict::bad(
            "No signature matches any secret of this endpoint. The body or the time was changed on the way, or it was \
             signed for another endpoint.",
        )
    }
}

pub(crate) struct Mistake {
    pub(crate) what: &'static str,
    pub(crate) why: &'static str,
    pub(crate) made: String,
}

pub(crate) struct Command {
    pub(crate) name: &'static str,
    pub(crate) text: String,
}

pub(crate) struct Verdict {
    pub(crate) good: bool,
    pub(crate) words: String,
}

impl Verdict {
    fn bad(words: &str) -> Self {
        Self {
            good: false,
            words: words.to_owned(),
        }
    }
}

/// Those of a header, in its order: `t=1,v1=ab,v1=cd`, `v1,AB v1,CD` or `v1a,…`.
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

/// The time of a `t-v1` header.
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
    fn each_signature_is_traced_to_its_secret_in_every_format() {
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
                .map(|one| sent.maker(one, &secrets).map(|k| k.state(now)))
                .collect();
            assert_eq!(states, [Some("current"), Some("retiring")]);
            assert!(sent.maker("00", &secrets).is_none());

            assert!(sent.verdict(&header, &secrets, now).good);
            let told = |body: &[u8]| request(format, body).verdict(&header, &secrets, now).words;
            assert!(told(br#"{"b":2}"#).starts_with("No signature matches"));
            assert!(told(&[BODY, b"\n"].concat()).contains("line ends"));
            assert!(!sent.verdict("t=1", &secrets, now).good);
            let late = DateTime::from_timestamp(T + 100, 0).expect("a time");
            let retired = [known(format, 1, Some(T + 60))];
            assert!(sent.verdict(&header, &retired, late).words.contains("retired"));
        }
    }

    #[test]
    fn a_body_that_was_written_again_is_recognised() {
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
        assert!(verdict.words.contains("written again"), "{}", verdict.words);
    }

    #[test]
    fn a_mistake_never_makes_the_right_signature() {
        for format in SignatureFormat::ALL.iter().copied() {
            let known = known(format, 1, None);
            let sent = request(format, BODY);
            let right = sent.signature(&known.secret).expect("a signature");
            let mistakes = sent.mistakes(&known);
            assert!(mistakes.len() >= 3, "{format}");
            for mistake in mistakes {
                assert_ne!(mistake.made, right, "{}", mistake.what);
            }
        }
    }

    #[test]
    fn a_command_never_holds_the_secret() {
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
