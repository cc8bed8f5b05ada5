//! Stored responses to idempotent requests. Some contain a secret, so all are encrypted, each bound to its request.

use aes_gcm::{
    Nonce,
    aead::{Aead, Payload},
};

use super::{KEY_NAME_BYTES, NONCE_BYTES, Vault, VaultError};

impl Vault {
    pub fn seal_response(&self, scope: &[u8], clear: &[u8]) -> Vec<u8> {
        let (name, cipher) = &self.keys[0];
        let nonce: [u8; NONCE_BYTES] = rand::random();
        let aad = bound_to(scope);
        let payload = Payload {
            msg: clear,
            aad: &aad,
        };
        let Ok(sealed) = cipher.encrypt(&Nonce::from(nonce), payload) else {
            unreachable!("AES-GCM refuses only values of many gigabytes")
        };
        [name.as_slice(), &nonce, &sealed].concat()
    }

    pub fn open_response(&self, scope: &[u8], sealed: &[u8]) -> Result<Vec<u8>, VaultError> {
        let (name, rest) = sealed
            .split_at_checked(KEY_NAME_BYTES)
            .ok_or(VaultError::WrongKey)?;
        let (nonce, ciphertext) = rest.split_at_checked(NONCE_BYTES).ok_or(VaultError::WrongKey)?;
        let nonce: [u8; NONCE_BYTES] = nonce.try_into().map_err(|_| VaultError::WrongKey)?;
        let aad = bound_to(scope);
        self.keys
            .iter()
            .filter(|(key_name, _)| key_name == name)
            .find_map(|(_, cipher)| {
                let payload = Payload {
                    msg: ciphertext,
                    aad: &aad,
                };
                cipher.decrypt(&Nonce::from(nonce), payload).ok()
            })
            .ok_or(VaultError::WrongKey)
    }
}

fn bound_to(scope: &[u8]) -> Vec<u8> {
    [b"postrider:answer:".as_slice(), scope].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_opens_for_its_own_request_only() {
        let vault = Vault::parse("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=").expect("a key");
        let sealed = vault.seal_response(b"one", b"whsec_clear");
        assert!(!sealed.windows(5).any(|w| w == b"clear"));
        assert_eq!(vault.open_response(b"one", &sealed), Ok(b"whsec_clear".to_vec()));
        assert_eq!(vault.open_response(b"two", &sealed), Err(VaultError::WrongKey));
    }
}
