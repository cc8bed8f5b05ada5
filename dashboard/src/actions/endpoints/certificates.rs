//! An endpoint's TLS settings: the CAs its certificate is verified against, and our client certificate.
//! Invariant: stored encrypted; only fingerprints of stored certificates are returned.

use postrider_dispatcher::{
    tls,
    vault::{Purpose, Vault},
};
use postrider_proto::api::{TlsFingerprints, TlsSettings};
use sqlx::PgExecutor;

use crate::{
    http::problem::{Faults, Problem},
    tables::endpoints::{self as table, EndpointRow},
};

pub(super) fn check_tls(given: &TlsSettings, faults: &mut Faults) {
    if let Err(fault) = tls::check(given) {
        faults.add(&format!("tls/{}", fault.field), fault.reason);
    }
}

/// Replaces the stored settings as a whole; null and `{}` remove them.
pub(super) async fn keep_tls(
    vault: &Vault,
    db: impl PgExecutor<'_>,
    row: &mut EndpointRow,
    given: Option<Option<TlsSettings>>,
) -> Result<(), Problem> {
    let Some(given) = given else { return Ok(()) };
    let sealed = match given.filter(|tls| !tls.is_empty()) {
        None => None,
        Some(tls) => {
            let clear = serde_json::to_vec(&tls).map_err(|error| {
                Problem::bad_request(format!("The certificates could not be stored: {error}."))
            })?;
            Some(vault.seal(row.owner(), Purpose::Tls, &clear))
        }
    };
    if sealed.is_some() || row.tls.is_some() {
        table::set_tls(db, row.id, sealed.as_deref()).await?;
        row.tls = sealed;
    }
    Ok(())
}

/// Settings that can't be decrypted count as none here.
pub(crate) fn shown(vault: &Vault, row: &EndpointRow) -> Option<TlsFingerprints> {
    Some(tls::fingerprints(&open_tls(vault, row)?))
}

/// For requests that this process sends to the endpoint.
pub(crate) fn open_tls(vault: &Vault, row: &EndpointRow) -> Option<TlsSettings> {
    let clear = vault.open(row.owner(), Purpose::Tls, row.tls.as_deref()?).ok()?;
    serde_json::from_slice(&clear).ok()
}
