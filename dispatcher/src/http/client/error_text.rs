//! What went wrong with an attempt, in words that the person who runs the receiver can act on.

use std::{error::Error, io};

use chrono::DateTime;
use postrider_proto::{Outcome, OutcomeKind};
use rustls::{AlertDescription, CertificateError, pki_types::UnixTime};

use super::{OwnFault, connect::ConnectError, dns::NameError, response::kept_text};
use crate::http::{proxy::TunnelError, tls::SelfSigned};

/// Names of a certificate that are told.
const NAMES_MAX: usize = 5;

fn told(kind: OutcomeKind, words: String) -> Outcome {
    Outcome::Unreachable {
        kind,
        error: kept_text(words),
    }
}

/// An attempt that came to no connection.
pub(super) fn not_connected(error: ConnectError) -> Result<Outcome, OwnFault> {
    Ok(match &error {
        ConnectError::OutOfFiles(_) => return Err(OwnFault(error.to_string())),
        ConnectError::Http(error) => broken(error),
        ConnectError::Refused(refusal) => Outcome::Forbidden {
            error: refusal.to_string(),
        },
        ConnectError::Name(NameError::NotFound(_)) => told(OutcomeKind::NameNotFound, error.to_string()),
        ConnectError::Name(NameError::NoAnswer(_)) => told(OutcomeKind::NameNotFound, error.to_string()),
        ConnectError::Tcp(error) => told(OutcomeKind::ConnectionFailed, of_io(error)),
        ConnectError::Tunnel(TunnelError::Proxy(_)) => told(OutcomeKind::ProxyFailed, error.to_string()),
        ConnectError::Tunnel(TunnelError::Endpoint(_) | TunnelError::Forbidden(_)) => {
            told(OutcomeKind::ConnectionFailed, error.to_string())
        }
        ConnectError::Tls(error) => told(OutcomeKind::TlsFailed, of_handshake(error)),
    })
}

/// Connected, but no answer that can be read.
pub(super) fn broken(error: &hyper::Error) -> Outcome {
    let kind = OutcomeKind::BrokenAnswer;
    if error.is_parse_too_large() {
        return told(kind, "the headers of the answer are too large".to_owned());
    }
    if error.is_parse() {
        return told(kind, "the answer is not HTTP/1.1".to_owned());
    }
    if error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
        return told(kind, "the connection was closed before an answer came".to_owned());
    }
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(error) = inner.downcast_ref::<io::Error>() {
            // With TLS 1.3 an endpoint that does not take our certificate says so only now.
            return match rustls_error(error) {
                Some(error) => told(OutcomeKind::TlsFailed, of_tls(error)),
                None => told(kind, of_io(error)),
            };
        }
        cause = inner.source();
    }
    told(kind, error.to_string())
}

pub(super) fn of_io(error: &io::Error) -> String {
    use io::ErrorKind::*;
    match error.kind() {
        ConnectionRefused => "connection refused".to_owned(),
        ConnectionReset | BrokenPipe | ConnectionAborted => "the connection was reset".to_owned(),
        HostUnreachable | NetworkUnreachable | AddrNotAvailable => "the address can't be reached".to_owned(),
        TimedOut => "the connection timed out".to_owned(),
        UnexpectedEof => "the connection was closed before an answer came".to_owned(),
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
        rustls::Error::InvalidMessage(_) => "the endpoint does not speak TLS at this port".to_owned(),
        rustls::Error::AlertReceived(Alert::CertificateRequired) => {
            "the endpoint wants a client certificate, and was shown none".to_owned()
        }
        rustls::Error::AlertReceived(
            Alert::BadCertificate
            | Alert::UnknownCA
            | Alert::CertificateUnknown
            | Alert::AccessDenied
            | Alert::CertificateExpired,
        ) => "the endpoint wants a client certificate, and not the one it was shown".to_owned(),
        rustls::Error::AlertReceived(Alert::UnrecognisedName) => {
            "the endpoint's server does not know this host name (TLS)".to_owned()
        }
        rustls::Error::AlertReceived(alert) => {
            format!("the endpoint broke off the TLS handshake: {alert:?}")
        }
        rustls::Error::PeerIncompatible(why) => {
            format!("the endpoint speaks no TLS that is safe to use: {why:?}")
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
            names if names.is_empty() => "the TLS certificate is for no host at all".to_owned(),
            names => format!("the TLS certificate is for another host: {names}"),
        },
        CertificateError::NotValidForName => "the TLS certificate is for another host".to_owned(),
        CertificateError::UnknownIssuer => {
            "the TLS certificate is signed by an authority that is not trusted here; \
                                            perhaps the server leaves out an intermediate certificate"
                .to_owned()
        }
        CertificateError::Revoked => "the TLS certificate was revoked".to_owned(),
        CertificateError::Other(other) if other.0.is::<SelfSigned>() => {
            "the TLS certificate is self-signed: nobody vouches for it".to_owned()
        }
        other => format!("the TLS certificate can't be trusted: {other}"),
    }
}

/// `DnsName("a.example")` is how the library tells them.
fn names(presented: &[String]) -> String {
    let bare = |name: &String| {
        let inner = name
            .split_once('(')
            .map_or(name.as_str(), |(_, rest)| rest.trim_end_matches(')'));
        inner.trim_matches('"').to_owned()
    };
    let mut told: Vec<String> = presented.iter().take(NAMES_MAX).map(bare).collect();
    if presented.len() > NAMES_MAX {
        told.push("…".to_owned());
    }
    told.join(", ")
}

fn day(time: UnixTime) -> String {
    i64::try_from(time.as_secs())
        .ok()
        .and_then(|seconds| DateTime::from_timestamp(seconds, 0))
        .map_or_else(
            || "an unknown day".to_owned(),
            |time| time.format("%Y-%m-%d").to_string(),
        )
}
