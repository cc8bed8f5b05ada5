//! The stream of a listener: one JSON object per line for as long as it is read.

use data_encoding::BASE64;
use reqwest::Response;
use serde::Deserialize;

use crate::{Client, Error};

/// An event's body plus its headers.
const LINE_BYTES_MAX: usize = 1024 * 1024;

/// A request as the server would have sent it: forward these headers and these exact bytes, and the signature
/// verifies.
#[derive(Debug, Clone)]
pub struct Handover {
    pub event: String,
    pub type_name: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

#[derive(Deserialize)]
struct Message {
    event: Option<String>,
    r#type: Option<String>,
    #[serde(default)]
    headers: Vec<(String, String)>,
    body: Option<String>,
}

/// Incoming requests of a listener.
pub struct Stream {
    client: Client,
    response: Response,
    /// Read but not returned yet.
    rest: Vec<u8>,
}

impl Client {
    /// The listener expires shortly after the stream is dropped.
    pub async fn listen(&self, tenant: &str, listener: &str) -> Result<Stream, Error> {
        let path = ["v1", "tenants", tenant, "listeners", listener, "requests"];
        Ok(Stream {
            client: self.clone(),
            response: self.open(&path).await?,
            rest: Vec::new(),
        })
    }
}

impl Stream {
    /// Waits for the next request. None: the server has ended the stream.
    pub async fn next(&mut self) -> Result<Option<Handover>, Error> {
        loop {
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                if let Some(handover) = self.read(&line)? {
                    return Ok(Some(handover));
                }
            }
            if self.rest.len() > LINE_BYTES_MAX {
                return Err(self.client.unreadable("line too long".to_owned()));
            }
            match self.response.chunk().await {
                Ok(Some(chunk)) => self.rest.extend_from_slice(&chunk),
                Ok(None) => return Ok(None),
                Err(error) => return Err(self.client.unreachable(&error)),
            }
        }
    }

    /// None for a keep-alive line.
    fn read(&self, line: &[u8]) -> Result<Option<Handover>, Error> {
        let line: Message =
            serde_json::from_slice(line).map_err(|error| self.client.unreadable(error.to_string()))?;
        let (Some(event), Some(body)) = (line.event, line.body) else {
            return Ok(None);
        };
        let body = BASE64
            .decode(body.as_bytes())
            .map_err(|error| self.client.unreadable(error.to_string()))?;
        Ok(Some(Handover {
            event,
            type_name: line.r#type.unwrap_or_default(),
            headers: line.headers,
            body,
        }))
    }
}
