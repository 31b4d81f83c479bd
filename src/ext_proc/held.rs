//! How much of request bodies is held here, over all exchanges, against a limit. An exchange that finds no more room goes
//! on with what it has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use crate::metrics::Metrics;

/// What all exchanges hold together.
pub(super) struct Held {
    bytes: AtomicUsize,
    metrics: Arc<Metrics>,
}

/// What one exchange holds; given back by drop.
pub(super) struct Share {
    held: Arc<Held>,
    bytes: usize,
}

impl Held {
    /// Nothing is held yet.
    pub(super) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            bytes: AtomicUsize::new(0),
            metrics,
        })
    }

    /// The share of one exchange.
    pub(super) fn share(self: &Arc<Self>) -> Share {
        Share {
            held: self.clone(),
            bytes: 0,
        }
    }
}

impl Share {
    /// The exchange holds so much now; says whether all together hold more than `most`.
    pub(super) fn set(&mut self, bytes: usize, most: usize) -> bool {
        if bytes == self.bytes {
            return false;
        }
        let held = &self.held;
        let all = match bytes.checked_sub(self.bytes) {
            Some(more) => held.bytes.fetch_add(more, Ordering::Relaxed) + more,
            None => {
                held.bytes.fetch_sub(self.bytes - bytes, Ordering::Relaxed) - (self.bytes - bytes)
            }
        };
        held.metrics
            .held_body_bytes
            .inc_by(bytes as i64 - self.bytes as i64);
        self.bytes = bytes;
        all > most
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0, usize::MAX);
    }
}

/// A body that counts until nobody has it any longer.
struct Counted {
    bytes: Bytes,
    _share: Share,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Held {
    /// Keeps a body that came whole; `None` where all together would hold more than `most`.
    pub(super) fn keep(self: &Arc<Self>, bytes: Bytes, most: usize) -> Option<Bytes> {
        let mut share = self.share();
        let over = share.set(bytes.len(), most);
        (!over).then(|| {
            Bytes::from_owner(Counted {
                bytes,
                _share: share,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_counts_as_long_as_anybody_has_it() {
        let metrics = Arc::new(Metrics::new());
        let held = Held::new(metrics.clone());
        let body = held.keep(Bytes::from_static(b"12345"), 8).unwrap();
        assert!(
            held.keep(Bytes::from_static(b"1234"), 8).is_none(),
            "9 of 8"
        );
        let part = body.slice(1..3);
        drop(body);
        assert_eq!((&*part, metrics.held_body_bytes.get()), (&b"23"[..], 5));
        drop(part);
        assert_eq!(metrics.held_body_bytes.get(), 0);
    }

    #[test]
    fn shares_add_up_and_are_given_back() {
        let metrics = Arc::new(Metrics::new());
        let held = Held::new(metrics.clone());
        let (mut one, mut other) = (held.share(), held.share());
        assert!(!one.set(60, 100));
        assert!(other.set(50, 100), "110 of 100");
        assert!(!one.set(40, 100));
        assert_eq!(metrics.held_body_bytes.get(), 90);
        drop(one);
        assert_eq!(metrics.held_body_bytes.get(), 50);
        drop(other);
        assert_eq!(
            (
                metrics.held_body_bytes.get(),
                held.bytes.load(Ordering::Relaxed)
            ),
            (0, 0)
        );
    }
}
