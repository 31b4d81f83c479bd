//! Open watches of the API server, and their events.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::Bytes;
use http_body::{Body as _, Frame};
use kube::client::Body;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::credentials::describe;
use super::error::RequestFailure;
use super::store::{ObjectChange, ReceivedObject};

/// Maximum length of a line of a watch. Objects in etcd have at most 1.5 MiB.
const MAX_LINE: usize = 4 << 20;

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

    /// Returns the next event, or `None` at the end of the watch. A line beyond [`MAX_LINE`] is a
    /// failure, after which the watch cannot be read further.
    pub(super) async fn next<K: DeserializeOwned>(&mut self) -> Option<WatchEvent<K>> {
        loop {
            if let Some(at) = memchr::memchr(b'\n', &self.received[self.searched..]) {
                let line: Vec<u8> = self.received.drain(..=self.searched + at).collect();
                self.searched = 0;
                return Some(WatchEvent::parse(&line));
            }
            self.searched = self.received.len();
            if self.searched > MAX_LINE {
                return Some(WatchEvent::Failed(RequestFailure::too_long(
                    "a line of the watch",
                    MAX_LINE,
                )));
            }
            let data = next_data(&mut self.body).await?.ok()?;
            self.received.extend_from_slice(&data);
        }
    }
}

/// Reads a whole response of limited length.
pub(super) async fn read_body(mut body: Body, limit: usize) -> Result<Vec<u8>, RequestFailure> {
    let mut received = Vec::new();
    while let Some(data) = next_data(&mut body).await {
        let data = data.map_err(|error| RequestFailure::Transport(describe(&error)))?;
        if data.len() > limit.saturating_sub(received.len()) {
            return Err(RequestFailure::too_long("the response", limit));
        }
        received.extend_from_slice(&data);
    }
    Ok(received)
}

/// Returns the next data of a body, without trailers, or `None` at its end.
async fn next_data(body: &mut Body) -> Option<Result<Bytes, <Body as http_body::Body>::Error>> {
    loop {
        let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
        match frame.map(Frame::into_data) {
            Ok(Ok(data)) => return Some(Ok(data)),
            Ok(Err(_trailers)) => {}
            Err(error) => return Some(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::de::IgnoredAny;

    use super::*;

    fn watch(body: Vec<u8>) -> ObjectWatch {
        ObjectWatch::new(Body::from(body))
    }

    #[tokio::test]
    async fn watch_line_without_end_is_refused() {
        let mut lines = br#"{"type": "BOOKMARK", "object": {}}"#.to_vec();
        lines.push(b'\n');
        let mut open = watch([lines.clone(), vec![b'x'; MAX_LINE + 1]].concat());
        assert!(matches!(
            open.next::<IgnoredAny>().await,
            Some(WatchEvent::Bookmark { .. })
        ));
        let Some(WatchEvent::Failed(failure)) = open.next::<IgnoredAny>().await else {
            panic!("the line is accepted");
        };
        assert!(
            failure
                .to_string()
                .contains("a line of the watch is longer than 4 MiB"),
            "{failure}"
        );
    }

    #[tokio::test]
    async fn body_beyond_the_limit_is_refused() {
        assert_eq!(read_body(Body::from(vec![1; 9]), 9).await, Ok(vec![1; 9]));
        assert!(read_body(Body::from(vec![1; 10]), 9).await.is_err());
    }
}
