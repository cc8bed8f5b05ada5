//! Signing and verifying, over the raw bytes of the body.
//!
//! | format | `Webhook-Signature` | signed content | key |
//! |---|---|---|---|
//! | `t-v1` | `t=<unix>,v1=<hex>[,v1=<hex>]` | `<t>.<body>` | HMAC-SHA256, the secret as given, `whsec_` included, so that Stripe's libraries verify it |
//! | `standard` | `v1,<base64>[ v1,<base64>]` | `<id>.<t>.<body>` | HMAC-SHA256, the decoded base64 after `whsec_` (Standard Webhooks 1.0) |
//! | `standard-ed25519` | `v1a,<base64>[ v1a,<base64>]` | `<id>.<t>.<body>` | ed25519; the receiver has only the public key, `whpk_…` |
//!
//! Receivers need [`verify`], [`verify_standard`] or [`verify_ed25519`]. While a secret is being rotated, a header
//! carries one signature for each active secret; one match is enough.

pub mod diagnose;
mod verify;

use std::fmt;

use data_encoding::{BASE64, HEXLOWER};
use ed25519_dalek::{Signer, SigningKey};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

pub use crate::state::SignatureFormat;
pub use verify::{PublicKey, TOLERANCE_SECONDS, VerifyError, verify, verify_ed25519, verify_standard};

const SECRET_PREFIX: &str = "whsec_";
const PRIVATE_KEY_PREFIX: &str = "whsk_";
const PUBLIC_KEY_PREFIX: &str = "whpk_";
/// A shorter secret could be guessed.
const SECRET_BYTES_MIN: usize = 24;

/// A signing secret. It is not shown in logs.
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

    /// A secret for this format. The bytes must come from a secure source.
    pub fn generate(format: SignatureFormat, random: &[u8; 32]) -> Self {
        match format {
            SignatureFormat::TV1 | SignatureFormat::Standard => Self::from_random(random),
            SignatureFormat::StandardEd25519 => {
                let pair = SigningKey::from_bytes(random).to_keypair_bytes();
                Self(format!("{PRIVATE_KEY_PREFIX}{}", BASE64.encode(&pair)))
            }
        }
    }

    /// The secret itself, for callers who may see it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// What a receiver verifies with, if this is a private key.
    pub fn public_key(&self) -> Option<PublicKey> {
        Some(PublicKey::from(self.ed25519_key()?.verifying_key()))
    }

    /// The key of the `standard` format: the decoded bytes after `whsec_`, 24 to 64 of them.
    fn standard_key(&self) -> Option<Vec<u8>> {
        let bytes = BASE64
            .decode(self.0.strip_prefix(SECRET_PREFIX)?.as_bytes())
            .ok()?;
        (SECRET_BYTES_MIN..=64).contains(&bytes.len()).then_some(bytes)
    }

    /// The private key after `whsk_`: its 32 bytes, optionally followed by the 32 of its public key.
    fn ed25519_key(&self) -> Option<SigningKey> {
        let bytes = BASE64
            .decode(self.0.strip_prefix(PRIVATE_KEY_PREFIX)?.as_bytes())
            .ok()?;
        match bytes.len() {
            32 => Some(SigningKey::from_bytes(bytes.as_slice().try_into().ok()?)),
            64 => SigningKey::from_keypair_bytes(bytes.as_slice().try_into().ok()?).ok(),
            _ => None,
        }
    }

    /// Whether it can be used for signatures of this format.
    pub fn fits(&self, format: SignatureFormat) -> bool {
        match format {
            // A private key is never an HMAC key: the receiver would have to know it.
            SignatureFormat::TV1 => {
                // The prefix is public and makes no secret harder to guess.
                let own = self.0.strip_prefix(SECRET_PREFIX).unwrap_or(&self.0);
                own.len() >= SECRET_BYTES_MIN && !self.0.starts_with(PRIVATE_KEY_PREFIX)
            }
            SignatureFormat::Standard => self.standard_key().is_some(),
            SignatureFormat::StandardEd25519 => self.ed25519_key().is_some(),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The value of `Webhook-Signature`. `secrets` are the active ones, newest first.
pub fn sign(
    format: SignatureFormat,
    event_id: &str,
    unix_seconds: i64,
    body: &[u8],
    secrets: &[Secret],
) -> String {
    let t = unix_seconds.to_string();
    let mut header = String::with_capacity(32 + 96 * secrets.len());
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
                push_version(&mut header, "v1,");
                BASE64.encode_append(&hmac(&key, &parts), &mut header);
            }
        }
        SignatureFormat::StandardEd25519 => {
            let content = [event_id.as_bytes(), b".", t.as_bytes(), b".", body].concat();
            for key in secrets.iter().filter_map(Secret::ed25519_key) {
                push_version(&mut header, "v1a,");
                BASE64.encode_append(&key.sign(&content).to_bytes(), &mut header);
            }
        }
    }
    header
}

fn push_version(header: &mut String, version: &str) {
    if !header.is_empty() {
        header.push(' ');
    }
    header.push_str(version);
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

    #[test]
    fn a_generated_secret_fits_its_format() {
        for format in SignatureFormat::ALL {
            let secret = Secret::generate(*format, &[7; 32]);
            assert!(secret.fits(*format), "{format}");
        }
        let pair = Secret::generate(SignatureFormat::StandardEd25519, &[7; 32]);
        assert!(!pair.fits(SignatureFormat::TV1));
        assert!(!pair.fits(SignatureFormat::Standard));
        assert!(!format!("{pair:?}").contains("whsk_"));
    }

    #[test]
    fn a_private_key_may_be_given_with_or_without_its_public_half() {
        let seed = [9; 32];
        let with = Secret::generate(SignatureFormat::StandardEd25519, &seed);
        let without = Secret::new(format!("whsk_{}", BASE64.encode(&seed)));
        let public = with.public_key().expect("a key pair").to_string();
        assert!(public.starts_with("whpk_"), "{public}");
        assert_eq!(without.public_key().map(|key| key.to_string()), Some(public));
        // The public half of another pair: it could be used to learn the private key.
        let mut mixed = seed.to_vec();
        mixed.extend([1; 32]);
        let mixed = Secret::new(format!("whsk_{}", BASE64.encode(&mixed)));
        assert!(!mixed.fits(SignatureFormat::StandardEd25519));
    }
}
