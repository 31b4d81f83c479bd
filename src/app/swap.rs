//! A gRPC service that can be replaced while it is served, for the limits that tonic fixes when it makes one: each call is
//! answered by the one that was there when it began, to its end.

use std::sync::Arc;
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

/// A service in its place. A clone is the same place.
pub(super) struct Swap<S>(Arc<ArcSwap<S>>);

impl<S> Swap<S> {
    pub(super) fn new(service: S) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(service)))
    }

    /// Calls from now on go to another one.
    pub(super) fn replace(&self, service: S) {
        self.0.store(Arc::new(service));
    }
}

impl<S> Clone for Swap<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: NamedService> NamedService for Swap<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: Service<http::Request<B>> + Clone, B> Service<http::Request<B>> for Swap<S> {
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
