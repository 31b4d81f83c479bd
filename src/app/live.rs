//! A gRPC service that can be replaced while it is served: each call is answered by the one that was there when it began,
//! to its end. So one exchange sees one configuration, whatever is reloaded meanwhile.

use std::sync::Arc;
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

/// A service in its place. A clone is the same place.
pub(super) struct Live<S>(Arc<ArcSwap<S>>);

impl<S> Live<S> {
    pub(super) fn new(service: S) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(service)))
    }

    /// Calls from now on go to another one.
    pub(super) fn replace(&self, service: S) {
        self.0.store(Arc::new(service));
    }
}

impl<S> Clone for Live<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: NamedService> NamedService for Live<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: Service<http::Request<B>> + Clone, B> Service<http::Request<B>> for Live<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    /// Services that tonic makes are always ready.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let mut service = S::clone(&self.0.load());
        service.call(request)
    }
}
