//! Streams over TCP and Unix sockets.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;

use crate::endpoint::ZmtpEndpoint;
use crate::error::ZmtpError;

/// TCP keepalive settings. They detect a lost peer that does not support ZMTP heartbeats.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(30))
    .with_interval(Duration::from_secs(10))
    .with_retries(3);

/// A bidirectional byte stream.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// A stream of any transport.
pub(crate) type TransportStream = Box<dyn ByteStream>;

/// Connects to an endpoint.
pub(crate) async fn connect(
    endpoint: &ZmtpEndpoint,
    within: Duration,
) -> Result<TransportStream, ZmtpError> {
    let connected = async {
        match endpoint {
            ZmtpEndpoint::Tcp(address) => tcp_stream(TcpStream::connect(address).await?),
            ZmtpEndpoint::Ipc(path) => {
                Ok(Box::new(UnixStream::connect(path).await?) as TransportStream)
            }
        }
    };
    Ok(timeout(within, connected)
        .await
        .map_err(|_| ZmtpError::ConnectTimeout(within))??)
}

fn tcp_stream(stream: TcpStream) -> io::Result<TransportStream> {
    stream.set_nodelay(true)?;
    SockRef::from(&stream).set_tcp_keepalive(&KEEPALIVE)?;
    Ok(Box::new(stream))
}

/// A listening socket of any transport.
pub(crate) enum TransportListener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl TransportListener {
    /// Listens on an endpoint.
    pub(crate) async fn bind(endpoint: &ZmtpEndpoint) -> Result<Self, ZmtpError> {
        Ok(match endpoint {
            ZmtpEndpoint::Tcp(address) => TransportListener::Tcp(
                TcpListener::bind(ZmtpEndpoint::bind_address(address)).await?,
            ),
            ZmtpEndpoint::Ipc(path) => {
                remove_stale_socket(path).await;
                TransportListener::Unix(UnixListener::bind(path)?)
            }
        })
    }

    /// Returns the endpoint with the port that the system chose.
    pub(crate) fn local_endpoint(&self, bound: &ZmtpEndpoint) -> Result<ZmtpEndpoint, ZmtpError> {
        Ok(match self {
            TransportListener::Tcp(listener) => {
                ZmtpEndpoint::Tcp(listener.local_addr()?.to_string())
            }
            TransportListener::Unix(_) => bound.clone(),
        })
    }

    /// Accepts a connection. Returns it with the peer's address, for logs.
    pub(crate) async fn accept(&self) -> io::Result<(TransportStream, String)> {
        match self {
            TransportListener::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                Ok((tcp_stream(stream)?, peer.to_string()))
            }
            TransportListener::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let pid = stream
                    .peer_cred()
                    .ok()
                    .and_then(|credentials| credentials.pid());
                Ok((
                    Box::new(stream),
                    pid.map_or_else(
                        || "local process".to_owned(),
                        |pid| format!("process {pid}"),
                    ),
                ))
            }
        }
    }
}

/// Removes a socket file that no process listens on, because a socket file outlives the process
/// that bound it. Any other file and a socket that accepts connections are left in place, so that
/// binding fails.
async fn remove_stale_socket(path: &Path) {
    let is_socket =
        std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let is_stale = is_socket
        && UnixStream::connect(path)
            .await
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if is_stale {
        // If the file cannot be removed, binding reports the error.
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_socket_file_without_listener_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events");
        std::fs::write(&path, "precious").unwrap();
        remove_stale_socket(&path).await;
        assert!(path.exists(), "not a socket");
        std::fs::remove_file(&path).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        remove_stale_socket(&path).await;
        assert!(path.exists(), "in use");
        drop(listener);
        remove_stale_socket(&path).await;
        assert!(!path.exists(), "stale");
    }
}
