//! Describes failed attempts in terms that the operator of the receiver can act on.

use std::{error::Error, io};

use chrono::DateTime;
use postrider_proto::{Outcome, OutcomeKind};
use rustls::{AlertDescription, CertificateError, pki_types::UnixTime};

use super::{OwnFault, connect::ConnectError, forbidden, response::kept_text};
use crate::http::{proxy::TunnelError, tls::SelfSigned};

const CLOSED: &str = "the connection was closed before a response was received";
/// Names of a certificate that are shown.
const NAMES_MAX: usize = 5;

fn unreachable(kind: OutcomeKind, words: String) -> Outcome {
    Outcome::Unreachable {
        kind,
        error: kept_text(words),
    }
}

/// An attempt that failed before it was connected.
pub(super) fn not_connected(error: ConnectError) -> Result<Outcome, OwnFault> {
    Ok(match &error {
        ConnectError::OutOfFiles(_) => return Err(OwnFault(error.to_string())),
        ConnectError::Http(error) => broken(error),
        ConnectError::Refused(refusal) => forbidden(refusal),
        ConnectError::Name(_) => unreachable(OutcomeKind::NameNotFound, error.to_string()),
        ConnectError::Tcp(error) => unreachable(OutcomeKind::ConnectionFailed, of_io(error)),
        ConnectError::Tunnel(TunnelError::Proxy(_)) => {
            unreachable(OutcomeKind::ProxyFailed, error.to_string())
        }
        ConnectError::Tunnel(TunnelError::Endpoint(_) | TunnelError::Forbidden(_)) => {
            unreachable(OutcomeKind::ConnectionFailed, error.to_string())
        }
        ConnectError::Tls(error) => unreachable(OutcomeKind::TlsFailed, of_handshake(error)),
    })
}

/// Connected, but without a usable response.
pub(super) fn broken(error: &hyper::Error) -> Outcome {
    let kind = OutcomeKind::InvalidResponse;
    if error.is_parse_too_large() {
        return unreachable(kind, "the response headers are too large".to_owned());
    }
    if error.is_parse() {
        return unreachable(kind, "the response is not HTTP/1.1".to_owned());
    }
    if error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
        return unreachable(kind, CLOSED.to_owned());
    }
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(error) = inner.downcast_ref::<io::Error>() {
            // With TLS 1.3 an endpoint that rejects our certificate reports it only now.
            return match rustls_error(error) {
                Some(error) => unreachable(OutcomeKind::TlsFailed, of_tls(error)),
                None => unreachable(kind, of_io(error)),
            };
        }
        cause = inner.source();
    }
    unreachable(kind, error.to_string())
}

pub(super) fn of_io(error: &io::Error) -> String {
    use io::ErrorKind::*;
    match error.kind() {
        ConnectionRefused => "connection refused".to_owned(),
        ConnectionReset | BrokenPipe | ConnectionAborted => "the connection was reset".to_owned(),
        HostUnreachable | NetworkUnreachable | AddrNotAvailable => "the address is unreachable".to_owned(),
        TimedOut => "the connection timed out".to_owned(),
        UnexpectedEof => CLOSED.to_owned(),
        _ => error.to_string(),
    }
}

fn rustls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

fn of_handshake(error: &io::Error) -> String {
    match rustls_error(error) {
        Some(error) => of_tls(error),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            "the connection was closed during the TLS handshake".to_owned()
        }
        None => format!("{} during the TLS handshake", of_io(error)),
    }
}

fn of_tls(error: &rustls::Error) -> String {
    use AlertDescription as Alert;
    match error {
        rustls::Error::InvalidCertificate(error) => of_certificate(error),
        rustls::Error::InvalidMessage(_) => "the endpoint does not support TLS on this port".to_owned(),
        rustls::Error::AlertReceived(Alert::CertificateRequired) => {
            "the endpoint requires a client certificate and none is configured".to_owned()
        }
        rustls::Error::AlertReceived(
            Alert::BadCertificate
            | Alert::UnknownCA
            | Alert::CertificateUnknown
            | Alert::AccessDenied
            | Alert::CertificateExpired,
        ) => "the endpoint requires a client certificate and rejected the one presented".to_owned(),
        rustls::Error::AlertReceived(Alert::UnrecognisedName) => {
            "the server does not recognize this host name (TLS unrecognized_name)".to_owned()
        }
        rustls::Error::AlertReceived(alert) => {
            format!("the endpoint aborted the TLS handshake: {alert:?}")
        }
        rustls::Error::PeerIncompatible(why) => {
            format!("the endpoint supports no secure TLS version or cipher: {why:?}")
        }
        other => format!("TLS failed: {other}"),
    }
}

fn of_certificate(error: &CertificateError) -> String {
    match error {
        CertificateError::ExpiredContext { not_after, .. } => {
            format!("the TLS certificate expired on {}", day(*not_after))
        }
        CertificateError::Expired => "the TLS certificate has expired".to_owned(),
        CertificateError::NotValidYetContext { not_before, .. } => {
            format!("the TLS certificate is not valid before {}", day(*not_before))
        }
        CertificateError::NotValidForNameContext { presented, .. } => match names(presented) {
            names if names.is_empty() => "the TLS certificate contains no host name".to_owned(),
            names => format!("the TLS certificate is for a different host: {names}"),
        },
        CertificateError::NotValidForName => "the TLS certificate is for a different host".to_owned(),
        CertificateError::UnknownIssuer => "the TLS certificate was not issued by a trusted authority; \
                                            an intermediate certificate may be missing"
            .to_owned(),
        CertificateError::Revoked => "the TLS certificate was revoked".to_owned(),
        CertificateError::Other(other) if other.0.is::<SelfSigned>() => {
            "the TLS certificate is self-signed: not issued by a trusted authority".to_owned()
        }
        other => format!("the TLS certificate is not trusted: {other}"),
    }
}

/// The library formats them as `DnsName("a.example")`.
fn names(presented: &[String]) -> String {
    let bare = |name: &String| {
        let inner = name
            .split_once('(')
            .map_or(name.as_str(), |(_, rest)| rest.trim_end_matches(')'));
        inner.trim_matches('"').to_owned()
    };
    let mut shown: Vec<String> = presented.iter().take(NAMES_MAX).map(bare).collect();
    if presented.len() > NAMES_MAX {
        shown.push("…".to_owned());
    }
    shown.join(", ")
}

fn day(time: UnixTime) -> String {
    match DateTime::from_timestamp(time.as_secs() as i64, 0) {
        Some(time) => time.format("%Y-%m-%d").to_string(),
        None => "an unknown day".to_owned(),
    }
}
