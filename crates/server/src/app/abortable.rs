//! Connections that can be aborted while the process is still running.
//!
//! The tasks of connections belong to tonic and could only be ended together with the runtime. The
//! notifications of aborted exchanges would then never be sent.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

use crate::ext_proc::gateway::GatewayTraits;

/// A connection that ends when the token is cancelled.
pub(super) struct AbortableConnection<S> {
    socket: S,
    aborted: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<S> AbortableConnection<S> {
    pub(super) fn new(socket: S, abort: &CancellationToken) -> Self {
        // A child token for each connection, so that connections do not share one lock.
        Self {
            socket,
            aborted: Box::pin(abort.child_token().cancelled_owned()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AbortableConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.aborted.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Ok(())),
            Poll::Pending => Pin::new(&mut self.socket).poll_read(cx, buffer),
        }
    }
}

impl<S> AbortableConnection<S> {
    /// Aborts a write that waits for the client. `h2` does not read while a write waits.
    fn after_write<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_pending() && self.aborted.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AbortableConnection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.socket).poll_write(cx, buffer);
        self.after_write(cx, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.socket).poll_flush(cx);
        self.after_write(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.socket).poll_shutdown(cx);
        self.after_write(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.socket).poll_write_vectored(cx, buffers);
        self.after_write(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}

impl<S> Connected for AbortableConnection<S> {
    type ConnectInfo = GatewayTraits;

    fn connect_info(&self) -> Self::ConnectInfo {
        GatewayTraits::default()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn blocked_write_ends_on_abort() {
        let abort = CancellationToken::new();
        let (server, _client) = duplex(8);
        let mut connection = AbortableConnection::new(server, &abort);
        let writing = tokio::spawn(async move { connection.write_all(&[0; 64]).await });
        tokio::task::yield_now().await;
        assert!(!writing.is_finished());
        abort.cancel();
        let ended = tokio::time::timeout(std::time::Duration::from_secs(5), writing)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
