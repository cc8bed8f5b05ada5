//! Requests and responses. `calls` has the operations.

use std::{error::Error as _, time::Duration};

use reqwest::{
    Method, Response,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER},
    redirect::Policy,
};
use serde::{Serialize, de::DeserializeOwned};
use url::Url;

use crate::{Error, PageOf, Problem};

const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// Longer than the server takes for any request.
const CALL_TIME_MAX: Duration = Duration::from_secs(30);
/// A page of events has at most 8 MiB of bodies, a catalogue 16.
const RESPONSE_BYTES_MAX: usize = 64 * 1024 * 1024;
const USER_AGENT: &str = concat!("postrider-client/", env!("CARGO_PKG_VERSION"));

/// Cheap to clone. Its key is not shown in logs.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
    headers: HeaderMap,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({})", self.base)
    }
}

impl Client {
    /// `url` is the base URL of the API, without `/v1`.
    pub fn new(url: &str, key: &str) -> Result<Self, Error> {
        let bad = || Error::BadUrl(url.to_owned());
        let mut base = Url::parse(url).map_err(|_| bad())?;
        if !matches!(base.scheme(), "http" | "https") || base.cannot_be_a_base() {
            return Err(bad());
        }
        base.set_query(None);
        base.set_fragment(None);
        let mut bearer = HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| Error::BadKey)?;
        bearer.set_sensitive(true);
        // Fails only when the program has chosen a provider already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .user_agent(USER_AGENT)
            .connect_timeout(CONNECT_TIME_MAX)
            // A redirect could leak the key to another server.
            .redirect(Policy::none())
            .build()
            .map_err(|error| Error::Unreachable {
                url: url.to_owned(),
                reason: error.to_string(),
            })?;
        Ok(Self {
            http,
            base,
            headers: HeaderMap::from_iter([(AUTHORIZATION, bearer)]),
        })
    }

    /// The same client, whose next POST is executed once however often it is sent. Use a key for one request only.
    pub fn with_idempotency_key(&self, key: &str) -> Result<Self, Error> {
        let mut client = self.clone();
        let value = HeaderValue::try_from(key).map_err(|_| Error::BadKey)?;
        client
            .headers
            .insert(HeaderName::from_static("idempotency-key"), value);
        Ok(client)
    }

    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        path: &[&str],
        query: &[(&str, String)],
    ) -> Result<T, Error> {
        let response = self
            .send(Method::GET, path, query, None, Some(CALL_TIME_MAX))
            .await?;
        self.read(response).await
    }

    pub(crate) async fn page<T: DeserializeOwned>(
        &self,
        path: &[&str],
        page: &PageOf,
        filter: &[(&str, Option<String>)],
    ) -> Result<T, Error> {
        let mut query: Vec<(&str, String)> = filter
            .iter()
            .filter_map(|(name, value)| Some((*name, value.clone()?)))
            .collect();
        query.extend(page.limit.map(|limit| ("limit", limit.to_string())));
        query.extend(page.cursor.clone().map(|cursor| ("cursor", cursor)));
        self.get(path, &query).await
    }

    pub(crate) async fn with_body<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        body: &impl Serialize,
    ) -> Result<T, Error> {
        let body = serde_json::to_string(body).map_err(|error| self.unreadable(error.to_string()))?;
        let response = self
            .send(method, path, &[], Some(body), Some(CALL_TIME_MAX))
            .await?;
        self.read(response).await
    }

    pub(crate) async fn delete(&self, path: &[&str]) -> Result<(), Error> {
        let response = self
            .send(Method::DELETE, path, &[], None, Some(CALL_TIME_MAX))
            .await?;
        self.whole(response).await.map(|_| ())
    }

    /// A streaming response: only its start has a time limit.
    pub(crate) async fn open(&self, path: &[&str]) -> Result<Response, Error> {
        let opened = self.send(Method::GET, path, &[], None, None);
        let response = opened.await?;
        if response.status().is_success() {
            return Ok(response);
        }
        match self.whole(response).await {
            Ok(_) => Err(self.unreadable("the stream ended immediately".to_owned())),
            Err(error) => Err(error),
        }
    }

    async fn send(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
        body: Option<String>,
        limit: Option<Duration>,
    ) -> Result<Response, Error> {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let mut request = self.http.request(method, url).headers(self.headers.clone());
        if let Some(body) = body {
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        if let Some(limit) = limit {
            request = request.timeout(limit);
        }
        request.send().await.map_err(|error| self.unreachable(&error))
    }

    async fn read<T: DeserializeOwned>(&self, response: Response) -> Result<T, Error> {
        let bytes = self.whole(response).await?;
        serde_json::from_slice(&bytes).map_err(|error| self.unreadable(error.to_string()))
    }

    /// The body of a successful response, or the problem.
    async fn whole(&self, mut response: Response) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.unreachable(&error))? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > RESPONSE_BYTES_MAX {
                return Err(self.unreadable(format!("it is larger than {RESPONSE_BYTES_MAX} bytes")));
            }
        }
        let status = response.status();
        if status.is_success() {
            return Ok(bytes);
        }
        let mut problem: Problem = serde_json::from_slice(&bytes)
            .map_err(|_| self.unreadable(format!("status {status} without a problem document")))?;
        problem.retry_after_seconds = response
            .headers()
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok()?.parse().ok());
        Err(Error::Refused(Box::new(problem)))
    }

    /// The innermost cause is the most useful one.
    pub(crate) fn unreachable(&self, error: &reqwest::Error) -> Error {
        let mut reason = error.to_string();
        let mut cause = error.source();
        while let Some(inner) = cause {
            reason = inner.to_string();
            cause = inner.source();
        }
        Error::Unreachable {
            url: self.base.to_string(),
            reason,
        }
    }

    pub(crate) fn unreadable(&self, reason: String) -> Error {
        Error::Unreadable {
            url: self.base.to_string(),
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_base_url_is_refused() {
        for bad in ["", "localhost", "ftp://example.com", "mailto:a@b.c"] {
            assert!(matches!(Client::new(bad, "k"), Err(Error::BadUrl(_))), "{bad}");
        }
        assert!(matches!(Client::new("http://a/", "a\nb"), Err(Error::BadKey)));
        assert!(Client::new("https://hooks.example.com/base/", "k").is_ok());
    }

    #[test]
    fn the_key_does_not_show_itself() {
        let client = Client::new("http://127.0.0.1:1", "prk_secret").expect("a client");
        assert!(!format!("{client:?}").contains("prk_secret"));
    }
}
