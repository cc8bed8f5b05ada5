//! TLS of connections to endpoints: which authorities are trusted, and which client certificate is presented.
//! Invariant: certificates are always verified; if an endpoint has its own CA certificates, only those are trusted.

use std::sync::Arc;

pub use postrider_proto::api::{TlsFingerprints, TlsSettings};
use postrider_proto::limits::{TLS_CERTIFICATES_MAX, TLS_PEM_BYTES_MAX};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
};
use sha2::{Digest, Sha256};

/// Installs one cryptography provider for the whole process. Called once at startup.
pub fn install_provider() {
    // Fails only when one is installed already.
    let _ = ring::default_provider().install_default();
}

/// A validation error: the field and the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct TlsFault {
    pub field: &'static str,
    pub reason: String,
}

fn fault(field: &'static str, reason: impl Into<String>) -> TlsFault {
    TlsFault {
        field,
        reason: reason.into(),
    }
}

/// Whether connections could be made with these settings.
pub fn check(tls: &TlsSettings) -> Result<(), TlsFault> {
    Trust::of_machine().config(tls).map(|_| ())
}

pub fn fingerprints(tls: &TlsSettings) -> TlsFingerprints {
    let of = |pem: &Option<String>| -> Vec<String> {
        let found = pem.as_deref().map(|pem| certificates("", pem));
        let found = found.and_then(Result::ok).unwrap_or_default();
        found.iter().map(fingerprint).collect()
    };
    TlsFingerprints {
        ca_certificates: of(&tls.ca_certificates),
        client_certificate: of(&tls.client_certificate).into_iter().next(),
    }
}

/// Endpoints with the same settings share connections.
pub(crate) fn digest(tls: &TlsSettings) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in [&tls.ca_certificates, &tls.client_certificate, &tls.client_key] {
        let part = part.as_deref().unwrap_or_default();
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

fn fingerprint(certificate: &CertificateDer<'_>) -> String {
    data_encoding::HEXLOWER.encode(&Sha256::digest(certificate))
}

fn certificates(field: &'static str, pem: &str) -> Result<Vec<CertificateDer<'static>>, TlsFault> {
    if pem.len() > TLS_PEM_BYTES_MAX {
        return Err(fault(field, format!("must be at most {TLS_PEM_BYTES_MAX} bytes")));
    }
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .take(TLS_CERTIFICATES_MAX + 1)
        .collect::<Result<_, _>>()
        .map_err(|_| fault(field, "must be PEM: -----BEGIN CERTIFICATE-----"))?;
    let reason = match found.len() {
        0 => "must contain at least one certificate: -----BEGIN CERTIFICATE-----".to_owned(),
        1..=TLS_CERTIFICATES_MAX => return Ok(found),
        _ => format!("must be at most {TLS_CERTIFICATES_MAX} certificates"),
    };
    Err(fault(field, reason))
}

/// Trusted authorities of connections without their own CA certificates.
#[derive(Clone)]
pub(crate) struct Trust {
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
}

impl Trust {
    /// The machine's certificates, or the bundled browser set if the machine has none.
    pub(crate) fn of_machine() -> Self {
        static ROOTS: std::sync::OnceLock<Arc<RootCertStore>> = std::sync::OnceLock::new();
        let load = || {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                tracing::warn!("no CA certificates found on this machine; using the bundled ones");
                roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
            }
            Arc::new(roots)
        };
        Self {
            provider: Arc::new(ring::default_provider()),
            roots: ROOTS.get_or_init(load).clone(),
        }
    }

    pub(crate) fn config(&self, own: &TlsSettings) -> Result<Arc<ClientConfig>, TlsFault> {
        const CA: &str = "ca_certificates";
        let roots = match &own.ca_certificates {
            None => self.roots.clone(),
            Some(pem) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(CA, pem)? {
                    let added = roots.add(certificate);
                    added.map_err(|_| fault(CA, "contains an invalid certificate"))?;
                }
                Arc::new(roots)
            }
        };
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, self.provider.clone())
            .build()
            .map_err(|error| fault(CA, format!("can't be used: {error}")))?;
        let builder = ClientConfig::builder_with_provider(self.provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| fault(CA, format!("can't be used: {error}")))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Explaining(verifier)));
        let mut config = match (&own.client_certificate, &own.client_key) {
            (None, None) => builder.with_no_client_auth(),
            (Some(_), None) => return Err(fault("client_key", "is required with client_certificate")),
            (None, Some(_)) => return Err(fault("client_certificate", "is required with client_key")),
            (Some(chain), Some(key)) => {
                let chain = certificates("client_certificate", chain)?;
                if key.len() > TLS_PEM_BYTES_MAX {
                    let reason = format!("must be at most {TLS_PEM_BYTES_MAX} bytes");
                    return Err(fault("client_key", reason));
                }
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
                    .map_err(|_| fault("client_key", "must be an unencrypted private key in PEM"))?;
                let unusable = |error| match error {
                    Error::InconsistentKeys(_) => "does not match client_certificate",
                    _ => "must be an RSA, ECDSA or Ed25519 key",
                };
                let config = builder.with_client_auth_cert(chain, key);
                config.map_err(|error| fault("client_key", unusable(error)))?
            }
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

/// A certificate that is signed only by itself.
#[derive(Debug, thiserror::Error)]
#[error("self-signed")]
pub(crate) struct SelfSigned;

/// Adds detail to a rejection; rejects neither more nor less.
#[derive(Debug)]
struct Explaining(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for Explaining {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self
            .0
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        match verified {
            Err(Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::Other(_)))
                if is_self_signed(end_entity) =>
            {
                let error = CertificateError::Other(OtherError(Arc::new(SelfSigned)));
                Err(Error::InvalidCertificate(error))
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

fn is_self_signed(certificate: &CertificateDer<'_>) -> bool {
    webpki::EndEntityCert::try_from(certificate).is_ok_and(|parsed| parsed.issuer() == parsed.subject())
}
