//! Counts of the open streams and of the frames of a connection.

use std::collections::HashSet;

/// Streams that the client opened. A stream is open until the server ends it or either side resets
/// it.
#[derive(Debug, Default)]
pub struct OpenStreams {
    open: HashSet<u32>,
    /// Highest stream identifier so far.
    last: u32,
    frames: u64,
}

impl OpenStreams {
    /// Returns the number of open streams.
    pub fn count(&self) -> usize {
        self.open.len()
    }

    /// Returns the number of HEADERS and DATA frames so far, in both directions. Other frames do
    /// not count as activity.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    pub(crate) fn on_frame(&mut self) {
        self.frames += 1;
    }

    /// Handles HEADERS from the client. HEADERS of an existing stream are trailers and are ignored.
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
