//! Signing secrets, and the listeners that have one of their own.

use std::fmt;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{signature::Secret, state::SignatureFormat};

/// The part of a secret that is shown: an HMAC secret itself, but only the public key of a key pair.
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SecretValue {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub public_key: Option<String>,
}

impl From<&Secret> for SecretValue {
    fn from(secret: &Secret) -> Self {
        let public_key = secret.public_key().map(|key| key.to_string());
        Self {
            secret: public_key.is_none().then(|| secret.reveal().to_owned()),
            public_key,
        }
    }
}

impl fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretValue")
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = Secret))]
pub struct EndpointSecret {
    #[serde(flatten)]
    pub value: SecretValue,
    /// `current`, or `retiring` until a set time.
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::secret_state))]
    pub state: String,
    pub created_at: DateTime<Utc>,
    pub retires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Secrets {
    /// Newest first.
    pub data: Vec<EndpointSecret>,
}

#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = SecretRotationRequest))]
pub struct Rotation {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::overlap_or_null))]
    pub overlap_seconds: Option<i64>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::secret_or_null))]
    pub secret: Option<String>,
}

#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewListener {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::patterns_or_null))]
    pub types: Option<Vec<String>>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::signature_or_null))]
    pub signature: Option<SignatureFormat>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::secret_or_null))]
    pub secret: Option<String>,
}

#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Listener {
    pub id: String,
    pub types: Vec<String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::signature))]
    pub signature: SignatureFormat,
    /// What the receiver verifies with: the secret, or the public key.
    pub secret: String,
    /// Extended while a client reads its requests.
    pub expires_at: DateTime<Utc>,
}
