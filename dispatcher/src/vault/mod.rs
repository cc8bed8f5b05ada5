//! Encryption at rest for values that must be read again: signing secrets, custom headers, keys of client certificates, and
//! addresses of cells. AES-256-GCM with a fresh nonce per value, bound to its tenant, endpoint and purpose, so that a value
//! copied into another row does not decrypt there. `sealed.rs` knows where such values are stored.

pub mod custom_headers;
pub mod key_holders;
pub mod sealed;

use aes_gcm::{
    Aes256Gcm, Key, Nonce,
    aead::{Aead, KeyInit, Payload},
};
use data_encoding::BASE64;
use postrider_proto::{EndpointId, TenantId};
use sha2::{Digest, Sha256};

const NONCE_BYTES: usize = 12;
const ANSWER: &[u8] = b"postrider:answer:";
pub(crate) const KEY_NAME_BYTES: usize = 4;

/// The master keys. The first encrypts; all decrypt, so that a key can be rotated.
#[derive(Clone)]
pub struct Vault {
    keys: Vec<([u8; KEY_NAME_BYTES], Aes256Gcm)>,
}

/// The owner of a value; bound as associated data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pub tenant: TenantId,
    pub endpoint: EndpointId,
}

impl Owner {
    fn of_cell(cell: i16) -> Self {
        Self {
            tenant: TenantId(0),
            endpoint: EndpointId(i32::from(cell)),
        }
    }
}

/// The purpose of a value; bound as associated data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Secret,
    Headers,
    Tls,
    /// The URL of a cell's database. Its owner is the cell.
    CellUrl,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VaultError {
    #[error("a master key is 32 bytes in base64 (`openssl rand -base64 32` generates one)")]
    BadKey,
    #[error("a stored secret can't be decrypted: it was encrypted with another master key")]
    WrongKey,
}

impl Vault {
    /// Reads a comma-separated list of base64 keys.
    pub fn parse(keys: &str) -> Result<Self, VaultError> {
        let keys = keys
            .split(',')
            .map(|key| {
                let bytes = BASE64
                    .decode(key.trim().as_bytes())
                    .map_err(|_| VaultError::BadKey)?;
                let bytes: [u8; 32] = bytes.try_into().map_err(|_| VaultError::BadKey)?;
                let digest = Sha256::digest(bytes);
                let name = [digest[0], digest[1], digest[2], digest[3]];
                Ok((name, Aes256Gcm::new(&Key::<Aes256Gcm>::from(bytes))))
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self { keys })
    }

    /// The name of the encrypting key. Every sealed value begins with the name of its key.
    pub(crate) fn first_key(&self) -> &[u8; KEY_NAME_BYTES] {
        &self.keys[0].0
    }

    /// Of all keys, as in `first_key`.
    pub(crate) fn key_names(&self) -> Vec<Vec<u8>> {
        self.keys.iter().map(|(name, _)| name.to_vec()).collect()
    }

    pub fn seal(&self, owner: Owner, purpose: Purpose, clear: &[u8]) -> Vec<u8> {
        self.encrypt(&bound_to(owner, purpose), clear)
    }

    pub fn open(&self, owner: Owner, purpose: Purpose, sealed: &[u8]) -> Result<Vec<u8>, VaultError> {
        self.decrypt(&bound_to(owner, purpose), sealed)
    }

    /// The URL of a cell's database, as stored in `cells`.
    pub fn seal_cell_url(&self, cell: i16, url: &str) -> Vec<u8> {
        self.seal(Owner::of_cell(cell), Purpose::CellUrl, url.as_bytes())
    }

    pub fn open_cell_url(&self, cell: i16, sealed: &[u8]) -> Result<String, VaultError> {
        let url = self.open(Owner::of_cell(cell), Purpose::CellUrl, sealed)?;
        String::from_utf8(url).map_err(|_| VaultError::WrongKey)
    }

    /// A stored response to an idempotent request. Some contain a secret, so all are encrypted, each bound to its request.
    pub fn seal_response(&self, scope: &[u8], clear: &[u8]) -> Vec<u8> {
        self.encrypt(&[ANSWER, scope].concat(), clear)
    }

    pub fn open_response(&self, scope: &[u8], sealed: &[u8]) -> Result<Vec<u8>, VaultError> {
        self.decrypt(&[ANSWER, scope].concat(), sealed)
    }

    /// Key name, nonce, ciphertext.
    fn encrypt(&self, aad: &[u8], msg: &[u8]) -> Vec<u8> {
        let (name, cipher) = &self.keys[0];
        let nonce: [u8; NONCE_BYTES] = rand::random();
        let Ok(sealed) = cipher.encrypt(&Nonce::from(nonce), Payload { msg, aad }) else {
            unreachable!("AES-GCM refuses only values of many gigabytes")
        };
        [name.as_slice(), &nonce, &sealed].concat()
    }

    fn decrypt(&self, aad: &[u8], sealed: &[u8]) -> Result<Vec<u8>, VaultError> {
        let (name, rest) = sealed
            .split_at_checked(KEY_NAME_BYTES)
            .ok_or(VaultError::WrongKey)?;
        let (nonce, msg) = rest
            .split_first_chunk::<NONCE_BYTES>()
            .ok_or(VaultError::WrongKey)?;
        let keys = self.keys.iter().filter(|(key_name, _)| key_name == name);
        keys.map(|(_, cipher)| cipher.decrypt(&Nonce::from(*nonce), Payload { msg, aad }))
            .find_map(Result::ok)
            .ok_or(VaultError::WrongKey)
    }
}

fn bound_to(owner: Owner, purpose: Purpose) -> Vec<u8> {
    let Owner { tenant, endpoint } = owner;
    let purpose = match purpose {
        Purpose::Secret => "secret",
        Purpose::Headers => "headers",
        Purpose::Tls => "tls",
        Purpose::CellUrl => "cell",
    };
    format!("postrider:{purpose}:{tenant}:{endpoint}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> String {
        BASE64.encode(&[n; 32])
    }

    fn vault(keys: &[u8]) -> Vault {
        let keys: Vec<String> = keys.iter().map(|n| key(*n)).collect();
        Vault::parse(&keys.join(",")).expect("good keys")
    }

    fn owner(tenant: i32, endpoint: i32) -> Owner {
        Owner {
            tenant: TenantId(tenant),
            endpoint: EndpointId(endpoint),
        }
    }

    #[test]
    fn what_is_sealed_opens_and_does_not_show() {
        let sealed = vault(&[1]).seal(owner(3, 7), Purpose::Secret, b"whsec_clear");
        assert!(!sealed.windows(5).any(|w| w == b"clear"));
        assert_eq!(
            vault(&[1]).open(owner(3, 7), Purpose::Secret, &sealed),
            Ok(b"whsec_clear".to_vec())
        );
    }

    #[test]
    fn another_tenant_endpoint_purpose_or_key_does_not_open_it() {
        let sealed = vault(&[1]).seal(owner(3, 7), Purpose::Secret, b"x");
        for (keys, owner, purpose) in [
            (1, owner(3, 8), Purpose::Secret),
            (1, owner(4, 7), Purpose::Secret),
            (1, owner(3, 7), Purpose::Headers),
            (2, owner(3, 7), Purpose::Secret),
        ] {
            assert_eq!(
                vault(&[keys]).open(owner, purpose, &sealed),
                Err(VaultError::WrongKey)
            );
        }
        assert_eq!(
            vault(&[1]).open(owner(3, 7), Purpose::Secret, &sealed[..9]),
            Err(VaultError::WrongKey)
        );
    }

    #[test]
    fn an_older_key_still_opens_what_it_sealed() {
        let sealed = vault(&[1]).seal(owner(3, 7), Purpose::Headers, b"x");
        assert_eq!(
            vault(&[2, 1]).open(owner(3, 7), Purpose::Headers, &sealed),
            Ok(b"x".to_vec())
        );
    }

    #[test]
    fn an_answer_opens_for_its_own_request_only() {
        let sealed = vault(&[1]).seal_response(b"one", b"whsec_clear");
        assert!(!sealed.windows(5).any(|w| w == b"clear"));
        assert_eq!(
            vault(&[1]).open_response(b"one", &sealed),
            Ok(b"whsec_clear".to_vec())
        );
        assert_eq!(
            vault(&[1]).open_response(b"two", &sealed),
            Err(VaultError::WrongKey)
        );
    }

    #[test]
    fn keys_of_the_wrong_size_are_refused() {
        for bad in ["", "abc", &BASE64.encode(&[1; 31]), &format!("{},", key(1))] {
            assert!(matches!(Vault::parse(bad), Err(VaultError::BadKey)), "{bad}");
        }
    }
}
