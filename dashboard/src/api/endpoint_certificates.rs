//! An endpoint's own certificates: whom it is verified with, and what it is shown of us.
//! Invariant: they are stored sealed, and of what is stored only fingerprints are shown again.

use postrider_dispatcher::{
    tls::{TlsFingerprints, TlsSettings},
    vault::{Purpose, Vault},
};
use sqlx::PgExecutor;

use super::endpoint_rules::Faults;
use crate::{
    problem::Problem,
    tables::endpoints::{self as table, EndpointRow},
};

pub(super) fn check_tls(tls: &TlsSettings, faults: &mut Faults) {
    if let Err(fault) = tls.check() {
        faults.add(&format!("tls/{}", fault.field), fault.reason);
    }
}

/// What was given replaces what was there, as a whole; null and `{}` take it away.
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
                Problem::bad_request(format!("The certificates can't be written: {error}."))
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

/// What does not open is as good as none here.
pub(super) fn shown(vault: &Vault, row: &EndpointRow) -> Option<TlsFingerprints> {
    Some(open_tls(vault, row)?.fingerprints())
}

/// For requests of our own to the endpoint.
pub(crate) fn open_tls(vault: &Vault, row: &EndpointRow) -> Option<TlsSettings> {
    let clear = vault.open(row.owner(), Purpose::Tls, row.tls.as_deref()?).ok()?;
    serde_json::from_slice(&clear).ok()
}
