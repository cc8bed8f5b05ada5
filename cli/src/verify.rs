//! `verify`: checks the signature of a captured request and explains why it fails.
//! Invariant: secrets come from the environment or a file, never from the arguments, and are never printed.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, bail};
use chrono::Utc;
use clap::Args;
use postrider_proto::signature::{
    Secret,
    diagnose::{Captured, Finding},
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
    let secrets: Vec<Secret> = secrets
        .split([',', '\n'])
        .map(str::trim)
        .filter(|s| !s.is_empty())
        .map(Secret::new)
        .collect();
    let headers = std::fs::read_to_string(&arguments.headers)
        .with_context(|| format!("cannot read {}", arguments.headers.display()))?;
    let body = std::fs::read(&arguments.body)
        .with_context(|| format!("cannot read {}", arguments.body.display()))?;
    if secrets.is_empty() {
        bail!("{variable} is empty");
    }
    let now = arguments.at.unwrap_or_else(|| Utc::now().timestamp());
    let finding = captured(&headers, &body).diagnose(&secrets, now);
    let (verified, detail) = (is_verified(&finding), describe(&finding));
    if arguments.json {
        println!("{}", serde_json::json!({"verified": verified, "detail": detail}));
    } else {
        println!("{detail}");
    }
    Ok(if verified {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn captured<'a>(headers: &'a str, body: &'a [u8]) -> Captured<'a> {
    let value = |wanted: &str| {
        let found = headers.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.trim().eq_ignore_ascii_case(wanted).then(|| value.trim())
        });
        found.unwrap_or_default()
    };
    Captured {
        id: value("webhook-id"),
        timestamp: value("webhook-timestamp"),
        signature: value("webhook-signature"),
        body,
    }
}

/// The first secret is the current one; the others are retiring or have retired.
fn is_verified(finding: &Finding) -> bool {
    finding.is_accepted() && matches!(finding, Finding::Valid { secret: 0, .. })
}

fn describe(finding: &Finding) -> String {
    match finding {
        Finding::Valid { .. } if !finding.is_accepted() => {
            format!("{finding} (Use `--at` to set the time it was received.)")
        }
        Finding::Valid { secret: 0, .. } => {
            "The signature is valid: made with the current secret over this body, and recent enough."
                .to_owned()
        }
        Finding::Valid { secret, .. } => format!(
            "Signed with secret {} of the list, not with the first: that secret is retiring or has retired. A receiver that \
             only has the current secret rejects it.",
            secret + 1
        ),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_proto::signature::{SignatureFormat, sign};

    const NOW: i64 = 1_700_000_000;
    const BODY: &[u8] = b"{\"a\":1}";

    #[test]
    fn only_a_recent_signature_of_the_first_secret_is_verified() {
        for format in SignatureFormat::ALL.iter().copied() {
            let made = [1, 2].map(|n| Secret::generate(format, &[n; 32]));
            let known = made.clone().map(|secret| match secret.public_key() {
                Some(key) => Secret::new(key.to_string()),
                None => secret,
            });
            let signature = sign(format, "evt_1", NOW, BODY, &made[..1]);
            let headers = format!(
                "Host: x\r\nWebhook-Id: evt_1\r\nwebhook-timestamp: {NOW}\r\nWebhook-Signature: {signature}\r\n"
            );
            let check = |headers: &str, secrets: &[Secret], now| {
                let finding = captured(headers, BODY).diagnose(secrets, now);
                (is_verified(&finding), describe(&finding))
            };
            let turned = [known[1].clone(), known[0].clone()];
            for (headers, secrets, now, verified, text) in [
                (
                    headers.as_str(),
                    &known,
                    NOW,
                    true,
                    "The signature is valid: made with the current",
                ),
                (&headers, &turned, NOW, false, "Signed with secret 2 of the list"),
                (
                    &headers,
                    &known,
                    NOW + 301,
                    false,
                    "The signature is valid, but it is 301 seconds old",
                ),
                (
                    "Host: x",
                    &known,
                    NOW,
                    false,
                    "The Webhook-Signature header is missing",
                ),
            ] {
                let (is_verified, detail) = check(headers, secrets, now);
                assert_eq!(is_verified, verified, "{format}: {detail}");
                assert!(detail.starts_with(text), "{format}: {detail}, not {text}");
            }
        }
    }
}
