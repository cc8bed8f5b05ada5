//! Stand-in until the dashboard crate is there.
use postrider_dispatcher::{Wake, guard::Guard, vault::Vault};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

#[allow(dead_code)]
pub(crate) struct App {
    pub(crate) pool: PgPool,
    pub(crate) wake: Wake,
    pub(crate) vault: Vault,
    pub(crate) guard: Guard,
    pub(crate) defaults: postrider_dispatcher::Settings,
    pub(crate) public_url: String,
    pub(crate) admin_api_key: String,
}
pub(crate) async fn serve(
    listener: tokio::net::TcpListener,
    app: App,
    stop: CancellationToken,
) -> std::io::Result<()> {
    crate::health::serve(listener, app.pool, stop).await
}
pub(crate) async fn set_admin_password(_: &PgPool, _: &str) -> Result<(), sqlx::Error> {
    Ok(())
}
