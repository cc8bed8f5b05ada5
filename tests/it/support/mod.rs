//! What the tests stand on: a throwaway Postgres, the program as a process, a scripted receiver, an API client.
//! Invariant: a test has a database, a program and receivers of its own; nothing is left behind, however it ends.

mod api;
mod browser;
mod database;
mod dns;
mod fleet;
mod judges;
mod namespace;
mod person;
mod process;
mod receiver;
mod skipped;
mod tool;
mod world;

use std::{future::Future, time::Duration};

pub(crate) use api::{Api, Endpoint};
pub(crate) use browser::{Browser, Crawl};
pub(crate) use database::{Database, Replica};
pub(crate) use dns::{NameServer, Reply};
pub(crate) use fleet::{Fleet, repeated, times};
pub(crate) use judges::{Case, judge, node, node_on_urls, python};
pub(crate) use namespace::{database_inside, run_inside};
pub(crate) use person::{Form, Person, text_of};
pub(crate) use process::{ADMIN_API_KEY, ADMIN_PASSWORD, DataFolder, Launch, MASTER_KEY, Postrider};
pub(crate) use receiver::{Answer, Received, Receiver, most_at_once};
pub(crate) use skipped::skip;
pub(crate) use tool::{RunningTool, tool, tool_with};
pub(crate) use world::World;

/// Long enough for a busy machine; a test that gets here has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// A client that ignores proxies of the environment.
pub(crate) fn http_client() -> reqwest::ClientBuilder {
    postrider_dispatcher::tls::install_provider();
    reqwest::Client::builder().no_proxy()
}

/// Asks until the answer is there. For states that send no signal; where there is one, wait for that.
pub(crate) async fn until<T, F>(what: &str, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let asked = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(POLL).await;
        }
    };
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(answer) => answer,
        Err(_) => panic!("waited {PATIENCE:?} in vain: {what}"),
    }
}
