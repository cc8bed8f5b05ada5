//! An endpoint's custom headers, stored as one encrypted JSON object because they often hold credentials.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::vault::{Owner, Purpose, Vault, VaultError};

/// Names, as the owner wrote them, and values.
#[derive(Debug, Default)]
pub struct CustomHeaders(BTreeMap<String, String>);

#[derive(Debug, thiserror::Error)]
pub enum CustomHeadersError {
    #[error(transparent)]
    Vault(#[from] VaultError),
    #[error("invalid stored headers: {0}")]
    Stored(String),
}

impl From<BTreeMap<String, String>> for CustomHeaders {
    fn from(headers: BTreeMap<String, String>) -> Self {
        Self(headers)
    }
}

impl CustomHeaders {
    /// `None` without headers. The owner is part of the encryption, so the endpoint's row must exist.
    pub fn seal(&self, vault: &Vault, owner: Owner) -> Option<Vec<u8>> {
        let clear = serde_json::json!(self.0).to_string();
        (!self.0.is_empty()).then(|| vault.seal(owner, Purpose::Headers, clear.as_bytes()))
    }

    pub fn open(vault: &Vault, owner: Owner, sealed: Option<&[u8]>) -> Result<Self, CustomHeadersError> {
        let Some(sealed) = sealed else {
            return Ok(Self::default());
        };
        let clear = vault.open(owner, Purpose::Headers, sealed)?;
        let headers =
            serde_json::from_slice(&clear).map_err(|e| CustomHeadersError::Stored(e.to_string()))?;
        Ok(Self(headers))
    }

    pub fn into_names(self) -> Vec<String> {
        self.0.into_keys().collect()
    }

    /// As they are sent. The values are marked as sensitive.
    pub fn to_map(&self) -> Result<HeaderMap, CustomHeadersError> {
        let stored = |e: http::Error| CustomHeadersError::Stored(e.to_string());
        let sent = self.0.iter().map(|(name, value)| {
            let name = HeaderName::try_from(name).map_err(|e| stored(e.into()))?;
            let mut value = HeaderValue::try_from(value).map_err(|e| stored(e.into()))?;
            value.set_sensitive(true);
            Ok((name, value))
        });
        sent.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_encoding::BASE64;
    use postrider_proto::{EndpointId, TenantId};

    #[test]
    fn headers_are_sealed_and_opened_with_their_names_as_written() {
        let vault = Vault::parse(&BASE64.encode(&[1; 32])).expect("a key");
        let owner = Owner {
            tenant: TenantId(3),
            endpoint: EndpointId(7),
        };
        let headers = BTreeMap::from([("X-Token".to_owned(), "abc".to_owned())]);
        let sealed = CustomHeaders::from(headers)
            .seal(&vault, owner)
            .expect("a header");
        let opened = CustomHeaders::open(&vault, owner, Some(&sealed)).expect("the same key");
        let map = opened.to_map().expect("valid headers");
        assert!(map["x-token"] == "abc" && map["x-token"].is_sensitive());
        assert_eq!(opened.into_names(), ["X-Token"]);
        assert!(CustomHeaders::default().seal(&vault, owner).is_none());
        let broken = vault.seal(owner, Purpose::Headers, b"{");
        assert!(CustomHeaders::open(&vault, owner, Some(&broken)).is_err());
    }
}
