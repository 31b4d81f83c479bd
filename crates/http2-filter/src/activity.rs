//! The streams of a connection.

use std::collections::HashSet;

/// The streams that a client opened and that neither side has ended.
#[derive(Debug, Default)]
pub struct OpenStreams {
    open: HashSet<u32>,
    /// The highest stream identifier so far.
    last: u32,
    frames: u64,
}

impl OpenStreams {
    /// The number of streams that are open.
    pub fn count(&self) -> usize {
        self.open.len()
    }

    /// The number of HEADERS and DATA frames so far, in both directions. Other frames are no use of the connection.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    pub(crate) fn on_frame(&mut self) {
        self.frames += 1;
    }

    /// HEADERS of the client; those of a stream that exists are trailers.
    pub(crate) fn open(&mut self, stream: u32) {
        if stream > self.last {
            self.last = stream;
            self.open.insert(stream);
        }
    }

    pub(crate) fn close(&mut self, stream: u32) {
        self.open.remove(&stream);
    }
}
