//! Certificates: untrusted ones of endpoints, and our own client certificates.

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, date_time_ymd,
};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer},
    server::WebPkiClientVerifier,
};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::http::tls::{check, digest, fingerprints};

struct Authority {
    pem: String,
    der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

struct Signed {
    pem: String,
    der: CertificateDer<'static>,
    key: KeyPair,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        Self {
            pem: certificate.pem(),
            der: certificate.der().clone(),
            issuer: Issuer::new(params, key),
        }
    }

    fn sign(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Signed {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        change(&mut params);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Signed {
            pem: certificate.pem(),
            der: certificate.der().clone(),
            key,
        }
    }
}

/// Responds 204 to accepted clients, and requires a certificate of `clients` if given.
async fn serve(certificate: &Signed, clients: Option<&Authority>) -> SocketAddr {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("versions");
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots.add(authority.der.clone()).expect("a root");
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().expect("a verifier"))
        }
    };
    let key = PrivateKeyDer::Pkcs8(certificate.key.serialize_der().into());
    let mut config = builder
        .with_single_cert(vec![certificate.der.clone()], key)
        .expect("a certificate and its key");
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    listen(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            let Ok(mut stream) = acceptor.accept(stream).await else {
                return None;
            };
            assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"http/1.1".as_slice()));
            read_request(&mut stream).await;
            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
            Some(stream)
        }
    })
    .await
}

fn trusting(authority: &Authority) -> TlsSettings {
    TlsSettings {
        ca_certificates: Some(authority.pem.clone()),
        ..TlsSettings::default()
    }
}

async fn post_tls(address: SocketAddr, tls: &TlsSettings) -> Outcome {
    post(&sender(), &format!("https://{address}/hook"), Some(tls)).await
}

#[tokio::test]
async fn b9_a_certificate_that_must_not_be_trusted_fails_the_attempt_in_words() {
    let ours = Authority::new("Ours");
    let another = Authority::new("Another");
    let mut alone = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
    alone.distinguished_name.push(rcgen::DnType::CommonName, "Alone");
    let key = KeyPair::generate().expect("a key");
    let certificate = alone.self_signed(&key).expect("a certificate");
    let self_signed = Signed {
        pem: certificate.pem(),
        der: certificate.der().clone(),
        key,
    };
    let expired = ours.sign("127.0.0.1", |params| params.not_after = date_time_ymd(2026, 1, 2));
    let early = ours.sign("127.0.0.1", |params| {
        params.not_before = date_time_ymd(2999, 1, 2)
    });
    let elsewhere = ours.sign("hooks.example.com", |_| {});
    let unknown = another.sign("127.0.0.1", |_| {});
    for (certificate, words) in [
        (expired, "the TLS certificate expired on 2026-01-02"),
        (early, "the TLS certificate is not valid before 2999-01-02"),
        (
            elsewhere,
            "the TLS certificate is for a different host: hooks.example.com",
        ),
        (
            self_signed,
            "the TLS certificate is self-signed: not issued by a trusted authority",
        ),
        (
            unknown,
            "the TLS certificate was not issued by a trusted authority; an intermediate certificate may be missing",
        ),
    ] {
        let address = serve(&certificate, None).await;
        let outcome = post_tls(address, &trusting(&ours)).await;
        assert_eq!(failure(outcome), (OutcomeKind::TlsFailed, words.to_owned()));
    }
}

#[tokio::test]
async fn an_endpoint_s_own_authority_is_trusted_for_it_and_for_no_other() {
    let ours = Authority::new("Ours");
    let address = serve(&ours.sign("127.0.0.1", |_| {}), None).await;
    let sender = sender();
    let url = format!("https://{address}/hook");
    assert_eq!(
        post(&sender, &url, Some(&trusting(&ours))).await.status(),
        Some(204)
    );
    let (kind, _) = failure(post(&sender, &url, None).await);
    assert_eq!(kind, OutcomeKind::TlsFailed, "the same sender, another endpoint");
}

#[tokio::test]
async fn a_client_certificate_is_shown_to_the_endpoint_that_has_one() {
    let (ours, clients) = (Authority::new("Ours"), Authority::new("Clients"));
    let address = serve(&ours.sign("127.0.0.1", |_| {}), Some(&clients)).await;
    let client = |authority: &Authority| {
        let signed = authority.sign("postrider", |params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        });
        TlsSettings {
            client_certificate: Some(signed.pem),
            client_key: Some(signed.key.serialize_pem()),
            ..trusting(&ours)
        }
    };
    assert_eq!(post_tls(address, &client(&clients)).await.status(), Some(204));
    for (refused, why) in [
        (trusting(&ours), "none is configured"),
        (client(&ours), "rejected the one presented"),
    ] {
        let (kind, words) = failure(post_tls(address, &refused).await);
        assert_eq!(kind, OutcomeKind::TlsFailed);
        assert_eq!(
            words,
            format!("the endpoint requires a client certificate and {why}")
        );
    }
}

#[tokio::test]
async fn plain_http_at_a_tls_port_and_the_other_way_round_are_told() {
    let plain = answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    let ours = Authority::new("Ours");
    let (kind, words) = failure(post_tls(plain, &trusting(&ours)).await);
    // The plain server waits for the end of a request that never comes.
    assert!(
        matches!(kind, OutcomeKind::TlsFailed | OutcomeKind::TimedOut),
        "{words}"
    );
    let garbled = listen(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        stream
    })
    .await;
    let (kind, words) = failure(post_tls(garbled, &trusting(&ours)).await);
    assert_eq!(
        (kind, words.as_str()),
        (
            OutcomeKind::TlsFailed,
            "the endpoint does not support TLS on this port"
        )
    );
    let hung_up = listen(|stream| async move { drop(stream) }).await;
    let (kind, words) = failure(post_tls(hung_up, &trusting(&ours)).await);
    assert_eq!(kind, OutcomeKind::TlsFailed);
    assert!(words.ends_with("during the TLS handshake"), "{words}");
}

#[tokio::test]
async fn certificates_are_checked_when_they_are_saved() {
    let ours = Authority::new("Ours");
    let (one, two) = (ours.sign("a.example", |_| {}), ours.sign("b.example", |_| {}));
    let settings = |ca: Option<&str>, certificate: Option<&str>, key: Option<&str>| TlsSettings {
        ca_certificates: ca.map(str::to_owned),
        client_certificate: certificate.map(str::to_owned),
        client_key: key.map(str::to_owned),
    };
    let key = one.key.serialize_pem();
    let good = settings(Some(&ours.pem), Some(&one.pem), Some(&key));
    assert_eq!(check(&good), Ok(()));
    let shown = fingerprints(&good);
    assert_eq!(shown.ca_certificates.len(), 1);
    assert_eq!(shown.client_certificate.map(|f| f.len()), Some(64));
    assert!(!format!("{good:?}").contains("BEGIN"), "no key in a log");
    let many = ours.pem.repeat(11);
    let long = format!("{}{}", ours.pem, "x".repeat(20_000));
    let broken = ours.pem.replace("MII", "AAA");
    for (settings, field) in [
        (settings(Some("not PEM"), None, None), "ca_certificates"),
        (settings(Some(&broken), None, None), "ca_certificates"),
        (settings(Some(&many), None, None), "ca_certificates"),
        (settings(Some(&long), None, None), "ca_certificates"),
        (settings(Some(&key), None, None), "ca_certificates"),
        (settings(None, Some(&one.pem), None), "client_key"),
        (settings(None, None, Some(&key)), "client_certificate"),
        (settings(None, Some(&two.pem), Some(&key)), "client_key"),
        (settings(None, Some(&one.pem), Some(&ours.pem)), "client_key"),
        (settings(None, Some(&key), Some(&key)), "client_certificate"),
    ] {
        let fault = check(&settings).expect_err("a fault");
        assert_eq!(fault.field, field, "{fault}");
        assert!(!fault.reason.contains("BEGIN PRIVATE"), "{fault}");
    }
}

#[tokio::test]
async fn tls_settings_of_endpoints_with_certificates_of_their_own_are_shared_and_bounded() {
    let ours = Authority::new("Ours");
    let sender = sender();
    // Text before a PEM block is not part of it: each is another encoding of the same certificate.
    let settings = |n: usize| TlsSettings {
        ca_certificates: Some(format!("number {n}\n{}", ours.pem)),
        ..TlsSettings::default()
    };
    for n in 0..OWN_TLS_MAX + 50 {
        let made = sender.own_tls(&settings(n)).expect("settings");
        let again = sender.own_tls(&settings(n)).expect("the same");
        assert!(Arc::ptr_eq(&made, &again));
    }
    let clients = sender.own_tls.lock().expect("not poisoned");
    assert_eq!(clients.len(), OWN_TLS_MAX);
    assert!(!clients.contains_key(&digest(&settings(0))), "the oldest went");
    assert!(clients.contains_key(&digest(&settings(OWN_TLS_MAX + 49))));
}
