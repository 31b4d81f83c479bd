//! Limit of the open gRPC streams of a listener: exchanges of ext_proc, watches of the API and of
//! the health service, and xDS. The memory of a stream is small, but one connection can open any
//! number of them.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use prometheus_client::metrics::counter::Counter;
use tonic::Status;
use tonic::service::Routes;
use tracing::warn;
use warmroute_metrics::{ListenerLabel, Metrics};

/// Maximum number of open streams of each listener. Clones share the number, which a configuration
/// reload changes.
#[derive(Clone)]
pub(super) struct MaxStreams(Arc<AtomicUsize>);

impl MaxStreams {
    pub(super) fn new(count: u32) -> Self {
        Self(Arc::new(AtomicUsize::new(count as usize)))
    }

    pub(super) fn set(&self, count: u32) {
        self.0.store(count as usize, Ordering::Relaxed);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Open streams of one listener.
pub(super) struct StreamLimit {
    listener: &'static str,
    max: MaxStreams,
    open: Arc<AtomicUsize>,
    refused: Counter,
}

impl StreamLimit {
    pub(super) fn new(listener: &'static str, max: MaxStreams, metrics: &Metrics) -> Self {
        Self {
            listener,
            max,
            open: Arc::default(),
            refused: metrics
                .listeners
                .streams_refused
                .get_or_create_owned(&ListenerLabel { listener }),
        }
    }

    /// Applies the limit to all calls.
    pub(super) fn limit(self, routes: Routes) -> Routes {
        let limit = middleware::from_fn_with_state(Arc::new(self), limit_stream);
        routes.into_axum_router().layer(limit).into()
    }

    /// Counts a stream. Returns `None` if the limit is reached.
    fn admit(&self) -> Option<OpenStream> {
        let stream = OpenStream(self.open.clone());
        let before = self.open.fetch_add(1, Ordering::Relaxed);
        let max_streams = self.max.get();
        if before < max_streams {
            return Some(stream);
        }
        self.refused.inc();
        warn!(
            listener = self.listener,
            max_streams,
            hint = "see `listeners.limits.max_streams`",
            "too many open streams; stream refused"
        );
        None
    }
}

/// An open stream, counted until drop.
struct OpenStream(Arc<AtomicUsize>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn limit_stream(
    State(limit): State<Arc<StreamLimit>>,
    request: Request,
    next: Next,
) -> Response {
    let Some(stream) = limit.admit() else {
        // With `failure_mode_allow: true`, Envoy serves the request without warmroute.
        return Status::unavailable("too many open streams").into_http();
    };
    let response = next.run(request).await;
    response.map(|body| {
        axum::body::Body::new(CountedBody {
            body,
            _stream: stream,
        })
    })
}

/// Body of a response, whose end is the end of the stream.
struct CountedBody {
    body: axum::body::Body,
    _stream: OpenStream,
}

impl Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_beyond_the_limit_are_refused() {
        let metrics = Metrics::new();
        let max = MaxStreams::new(2);
        let limit = StreamLimit::new("ext_proc", max.clone(), &metrics);
        let first = limit.admit();
        let second = limit.admit();
        assert!(first.is_some() && second.is_some());
        assert!(limit.admit().is_none() && limit.admit().is_none());
        assert_eq!(limit.refused.get(), 2);
        drop(first);
        let third = limit.admit();
        assert!(third.is_some() && limit.admit().is_none());
        max.set(3);
        assert!(limit.admit().is_some());
    }
}
