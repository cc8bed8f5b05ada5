//! Opens the databases of cells for the API.

use std::sync::Arc;

use postrider_dashboard::{OpenCell, OpenedCell};
use postrider_dispatcher::{
    connector::{Access, Connector},
    vault::Vault,
};
use tokio_util::sync::CancellationToken;

use crate::{connect, roles};

/// Each cell is checked like the main database, and learns which master keys this process has.
pub(crate) fn opener(vault: Vault, stop: CancellationToken) -> OpenCell {
    Arc::new(move |url| {
        let (vault, stop) = (vault.clone(), stop.clone());
        Box::pin(async move {
            open(&url, vault, stop)
                .await
                .map_err(|error| format!("{error:#}"))
        })
    })
}

async fn open(url: &str, vault: Vault, stop: CancellationToken) -> anyhow::Result<OpenedCell> {
    let connector = Connector::parse(url, Access::Writes)?;
    let reserves = connect::cell_pools(&connector).await?;
    roles::check(&reserves.rest, &vault).await?;
    let keys = roles::register_keys(&reserves.rest, &vault, "dashboard").await?;
    let pool = reserves.rest.clone();
    tokio::spawn(async move {
        if let Err(error) = keys.keep(pool, vault, stop).await {
            tracing::warn!(%error, "cannot renew the key registration in a cell");
        }
    });
    Ok(OpenedCell { reserves, connector })
}
