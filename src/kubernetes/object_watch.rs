//! Open watches of the API server, and their events.

use std::future::poll_fn;
use std::pin::Pin;

use http_body::Body as _;
use kube::client::Body;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::error::RequestFailure;
use super::store::{ObjectChange, ReceivedObject};

/// An event of a watch.
pub(super) enum WatchEvent<K> {
    Changed {
        change: ObjectChange<K>,
        version: Option<String>,
    },
    Bookmark {
        version: Option<String>,
    },
    Failed(RequestFailure),
}

#[derive(Deserialize)]
struct RawEvent<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct RawStatus {
    #[serde(default)]
    code: u16,
    #[serde(default)]
    message: String,
}

impl<K: DeserializeOwned> WatchEvent<K> {
    fn parse(line: &[u8]) -> Self {
        match serde_json::from_slice::<RawEvent<'_>>(line) {
            Ok(event) => Self::from_raw(&event),
            Err(error) => Self::Failed(RequestFailure::Malformed(format!(
                "the line is not a watch event: {error}"
            ))),
        }
    }

    fn from_raw(event: &RawEvent<'_>) -> Self {
        if event.kind == "ERROR" {
            let RawStatus { code, message } =
                serde_json::from_str(event.object.get()).unwrap_or(RawStatus {
                    code: 0,
                    message: String::new(),
                });
            return Self::Failed(RequestFailure::Status {
                code,
                message,
                retry_after: None,
            });
        }
        let object = ReceivedObject::parse(event.object.get());
        let version = object.resource_version.clone();
        match event.kind.as_str() {
            "ADDED" | "MODIFIED" => Self::Changed {
                change: ObjectChange::Applied(object),
                version,
            },
            "DELETED" => Self::Changed {
                change: ObjectChange::Deleted(object.uid),
                version,
            },
            _ => Self::Bookmark { version },
        }
    }
}

/// An open watch.
pub(super) struct ObjectWatch {
    body: Body,
    pub(super) opened: Instant,
    received: Vec<u8>,
    /// Length of the prefix of `received` that contains no line end.
    searched: usize,
}

impl ObjectWatch {
    /// Creates a watch that reads its events from a response.
    pub(super) fn new(body: Body) -> Self {
        Self {
            body,
            opened: Instant::now(),
            received: Vec::new(),
            searched: 0,
        }
    }

    /// Returns the next event, or `None` at the end of the watch.
    pub(super) async fn next<K: DeserializeOwned>(&mut self) -> Option<WatchEvent<K>> {
        loop {
            if let Some(at) = memchr::memchr(b'\n', &self.received[self.searched..]) {
                let line: Vec<u8> = self.received.drain(..=self.searched + at).collect();
                self.searched = 0;
                return Some(WatchEvent::parse(&line));
            }
            self.searched = self.received.len();
            let frame = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context))
                .await?
                .ok()?;
            if let Ok(data) = frame.into_data() {
                self.received.extend_from_slice(&data);
            }
        }
    }
}
