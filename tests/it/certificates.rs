//! Endpoints with certificates of their own: a private authority, and a client certificate that the receiver asks for.

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use reqwest::{Method, StatusCode};
use rustls::{
    RootCertStore, ServerConfig, crypto::ring, pki_types::PrivateKeyDer, server::WebPkiClientVerifier,
};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;

use crate::support::{Database, MASTER_KEY, Person, Postrider};

const NEW_KEY: &str = "ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8=";

struct Receiver {
    url: String,
    ca: String,
    client_certificate: String,
    client_key: String,
}

/// Takes only those who show a certificate of its own authority.
async fn start() -> Receiver {
    start_until(4_000).await
}

/// The certificate expires on 2 January of this year.
async fn start_until(year: i32) -> Receiver {
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params
        .distinguished_name
        .push(DnType::CommonName, "A private authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key");
    let ca = params.self_signed(&key).expect("a certificate");
    let issuer = Issuer::new(params, key);
    let sign = |name: &str, usage| {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        params.extended_key_usages = vec![usage];
        params.not_after = date_time_ymd(year, 1, 2);
        let key = KeyPair::generate().expect("a key");
        (params.signed_by(&key, &issuer).expect("a certificate"), key)
    };
    let (server, server_key) = sign("127.0.0.1", ExtendedKeyUsagePurpose::ServerAuth);
    let (client, client_key) = sign("postrider", ExtendedKeyUsagePurpose::ClientAuth);
    let mut roots = RootCertStore::empty();
    roots.add(ca.der().clone()).expect("a root");
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_client_cert_verifier(verifier.expect("a verifier"))
        .with_single_cert(
            vec![server.der().clone()],
            PrivateKeyDer::Pkcs8(server_key.serialize_der().into()),
        );
    let acceptor = TlsAcceptor::from(Arc::new(config.expect("a certificate")));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let url = format!("https://{}/hook", listener.local_addr().expect("bound"));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    return;
                };
                let mut request = [0; 8192];
                if stream.read(&mut request).await.is_ok() {
                    let answer = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n";
                    let _ = stream.write_all(answer).await;
                    let _ = stream.shutdown().await;
                }
            });
        }
    });
    Receiver {
        url,
        ca: ca.pem(),
        client_certificate: client.pem(),
        client_key: client_key.serialize_pem(),
    }
}

#[tokio::test]
async fn an_expired_certificate_is_shown_with_its_date() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = start_until(2024).await;
    let api = program.api();
    let more = json!({ "retry_schedule": ["0s"], "tls": { "ca_certificates": receiver.ca } });
    api.acme(&receiver.url, more).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let dead = api.wait_for_state("acme", "dead", 1).await;
    let id = dead[0]["id"].as_str().expect("an id");
    let shown = api.get(&format!("/tenants/acme/deliveries/{id}")).await;
    let error = "the TLS certificate expired on 2024-01-02";
    assert_eq!(shown["attempts"][0]["error"], error, "{shown}");
    let mut person = Person::signed_in(&program).await;
    for path in [&*format!("/deliveries/{id}"), "/deliveries", "/dead-letters"] {
        let (_, page) = person.visit(path).await;
        assert!(
            page.contains("The TLS certificate expired on 2024-01-02"),
            "{path}: {page}"
        );
    }
}

#[tokio::test]
async fn an_endpoint_s_own_certificates_are_used_kept_sealed_and_taken_away() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = start().await;
    let api = program.api();
    let tls = json!({
        "ca_certificates": receiver.ca,
        "client_certificate": receiver.client_certificate,
        "client_key": receiver.client_key,
    });
    let more = json!({ "retry_schedule": ["0s"], "tls": tls });
    let endpoint = api.acme(&receiver.url, more).await;
    let event = || json!({ "type": "invoice.paid", "data": {} });
    api.emit("acme", event()).await;
    api.wait_for_state("acme", "delivered", 1).await;

    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let shown = api.get(&path).await;
    assert_eq!(
        shown["tls"]["ca_certificates"].as_array().map(Vec::len),
        Some(1),
        "{shown}"
    );
    assert_eq!(
        shown["tls"]["client_certificate"].as_str().map(str::len),
        Some(64),
        "{shown}"
    );
    assert!(!shown.to_string().contains("BEGIN"), "{shown}");
    let clear =
        "select count(*) from postrider.endpoints where position('BEGIN'::bytea in tls) > 0 or tls is null";
    assert_eq!(database.count(clear).await, 0, "sealed");

    // What does not fit is refused, and changes nothing.
    for (wrong, pointer) in [
        (
            json!({ "ca_certificates": "-----BEGIN CERTIFICATE-----" }),
            "/tls/ca_certificates",
        ),
        (
            json!({ "client_certificate": receiver.client_certificate }),
            "/tls/client_key",
        ),
        (
            json!({ "client_certificate": receiver.ca, "client_key": receiver.client_key }),
            "/tls/client_key",
        ),
    ] {
        let (status, problem) = api
            .call(Method::PATCH, &path, Some(json!({ "tls": wrong })))
            .await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{problem}");
    }
    api.emit("acme", event()).await;
    api.wait_for_state("acme", "delivered", 2).await;

    // Without a client certificate the receiver does not want us, without its authority we do not want the receiver.
    for (tls, words) in [
        (
            json!({ "ca_certificates": receiver.ca }),
            "requires a client certificate",
        ),
        (json!(null), "not issued by a trusted authority"),
    ] {
        let before = api.deliveries("acme", "state=dead").await.len();
        let (status, answer) = api.call(Method::PATCH, &path, Some(json!({ "tls": tls }))).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        api.emit("acme", event()).await;
        let dead = api.wait_for_state("acme", "dead", before + 1).await;
        let error = dead[0]["error"].as_str().unwrap_or_default().to_owned();
        assert!(error.contains(words), "{dead:?}");
    }
    let (_, answer) = api.call(Method::PATCH, &path, Some(json!({ "tls": tls }))).await;
    assert!(answer["tls"].is_object(), "{answer}");

    // They follow the master key.
    assert!(program.stop().await.success());
    let keys = format!("{NEW_KEY},{MASTER_KEY}");
    let output = Postrider::on_database("rotate-master-key", &database)
        .set("POSTRIDER_MASTER_KEY", keys)
        .output();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let program = Postrider::start_with(&database, &[("POSTRIDER_MASTER_KEY", NEW_KEY)]).await;
    program.api().emit("acme", event()).await;
    program.api().wait_for_state("acme", "delivered", 3).await;
}
