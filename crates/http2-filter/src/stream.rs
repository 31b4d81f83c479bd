//! The filter as a wrapper of the connection's byte stream.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::activity::OpenStreams;
use crate::inbound::InboundReader;
use crate::outbound::{OutboundReader, SentError};

/// Maximum octets of one read while a header block is incomplete.
const HELD_READ: usize = 2048;

/// Limits of a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Http2Limits {
    /// Maximum octets of a header block, frame headers included. The filter cannot decode a larger
    /// one, so reading fails with an error of the kind [`InvalidData`](io::ErrorKind::InvalidData).
    /// The limit must exceed the sum of the server's maximum frame size and header list size. The
    /// filter can then decode blocks that the server refuses with status 431.
    pub max_header_block_bytes: usize,
}

/// Connection of an HTTP/2 client, wrapped by the filter.
pub struct Http2Filter<S> {
    io: S,
    inbound: InboundReader,
    outbound: OutboundReader,
    streams: OpenStreams,
    /// Octets that were held back and may now be passed to the server.
    ready: Vec<u8>,
    /// Number of octets of `ready` that have passed.
    passed: usize,
    on_error: Box<dyn FnMut(SentError) + Send>,
}

impl<S> Http2Filter<S> {
    /// Creates a filter for a connection from which nothing has been read yet. The filter calls
    /// `on_error` for each error that the server sends.
    pub fn new(
        io: S,
        limits: Http2Limits,
        on_error: impl FnMut(SentError) + Send + 'static,
    ) -> Self {
        Self {
            io,
            inbound: InboundReader::new(limits.max_header_block_bytes),
            outbound: OutboundReader::default(),
            streams: OpenStreams::default(),
            ready: Vec::new(),
            passed: 0,
            on_error: Box::new(on_error),
        }
    }

    /// Returns the wrapped connection.
    pub fn get_ref(&self) -> &S {
        &self.io
    }

    /// Returns the open streams of the connection.
    pub fn streams(&self) -> &OpenStreams {
        &self.streams
    }

    /// Returns whether the client has sent the HTTP/2 preface.
    pub fn has_preface(&self) -> bool {
        self.inbound.has_preface()
    }

    /// Returns whether the filter holds back an incomplete frame or header block.
    pub fn is_mid_block(&self) -> bool {
        self.inbound.is_holding()
    }

    /// Returns the number of completed frames and header blocks that were received in parts. While
    /// it does not change, [`is_mid_block`](Self::is_mid_block) refers to the same block.
    pub fn completed_blocks(&self) -> u64 {
        self.inbound.completed()
    }

    /// Copies octets that may pass into `buf`.
    fn pass_ready(&mut self, buf: &mut ReadBuf<'_>) {
        let rest = &self.ready[self.passed..];
        let length = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..length]);
        self.passed += length;
        if self.passed == self.ready.len() {
            self.ready = Vec::new();
            self.passed = 0;
        }
    }
}

impl<S: AsyncRead + Unpin> Http2Filter<S> {
    /// Reads into the buffer of the caller. Returns true if the buffer has new octets or the
    /// connection has ended, and false if all octets are held back.
    fn poll_direct(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<bool>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        let read = &mut buf.filled_mut()[before..];
        if read.is_empty() {
            return Poll::Ready(Ok(true));
        }
        let passed = self.inbound.read(read, &mut self.streams);
        buf.set_filled(before + passed);
        Poll::Ready(Ok(passed > 0))
    }

    /// Reads the missing octets of an incomplete frame or header block.
    fn poll_missing(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut space = [0; HELD_READ];
        let mut read = ReadBuf::new(&mut space[..self.inbound.missing().clamp(1, HELD_READ)]);
        ready!(Pin::new(&mut self.io).poll_read(cx, &mut read))?;
        self.ready = match read.filled() {
            [] => self.inbound.release_held(),
            octets => self.inbound.read_held(octets, &mut self.streams),
        };
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Http2Filter<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            if !this.ready.is_empty() {
                this.pass_ready(buf);
                return Poll::Ready(Ok(()));
            }
            if this.inbound.is_oversized() {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "oversized HTTP/2 header block",
                )));
            }
            if this.inbound.is_holding() {
                ready!(this.poll_missing(cx))?;
            } else if ready!(this.poll_direct(cx, buf))? {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Http2Filter<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write(cx, octets))?;
        this.outbound
            .read(&octets[..written], &mut this.streams, &mut this.on_error);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write_vectored(cx, slices))?;
        let mut rest = written;
        for slice in slices {
            let length = slice.len().min(rest);
            this.outbound
                .read(&slice[..length], &mut this.streams, &mut this.on_error);
            rest -= length;
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}
