//! HTTP servers in the process of a test.

use std::net::SocketAddr;

use axum::Router;
use tokio::net::{TcpListener, ToSocketAddrs};
use tokio_util::task::AbortOnDropHandle;

/// HTTP server that stops on drop.
pub(crate) struct LocalServer {
    pub(crate) address: SocketAddr,
    _task: AbortOnDropHandle<()>,
}

impl LocalServer {
    /// Starts a server at a free port.
    pub(crate) async fn start(routes: Router) -> Self {
        Self::start_at("127.0.0.1:0", |_| routes).await
    }

    /// Starts a server whose routes depend on its address.
    pub(crate) async fn start_at(
        address: impl ToSocketAddrs,
        routes: impl FnOnce(SocketAddr) -> Router,
    ) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = routes(address);
        let task = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self {
            address,
            _task: AbortOnDropHandle::new(task),
        }
    }
}
