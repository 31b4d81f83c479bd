//! Budget for the request bodies in memory, over all exchanges. An exchange that exceeds it
//! continues with the bytes it has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use warmroute_metrics::Metrics;

/// Total size of the bodies that all exchanges hold.
pub(super) struct BodyBudget {
    bytes: AtomicUsize,
    metrics: Arc<Metrics>,
}

/// Size of the bodies that one exchange holds. Released by drop.
pub(super) struct BodyBudgetShare {
    budget: Arc<BodyBudget>,
    bytes: usize,
}

impl BodyBudget {
    /// Creates a budget without held bytes.
    pub(super) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            bytes: AtomicUsize::new(0),
            metrics,
        })
    }

    /// Creates an empty share for one exchange.
    pub(super) fn share(self: &Arc<Self>) -> BodyBudgetShare {
        BodyBudgetShare {
            budget: self.clone(),
            bytes: 0,
        }
    }
}

impl BodyBudgetShare {
    /// Sets the size of the share, and returns whether all shares exceed `limit`.
    pub(super) fn set(&mut self, bytes: usize, limit: usize) -> bool {
        if bytes == self.bytes {
            return false;
        }
        let budget = &self.budget;
        let total = match bytes.checked_sub(self.bytes) {
            Some(added) => budget.bytes.fetch_add(added, Ordering::Relaxed) + added,
            None => {
                budget
                    .bytes
                    .fetch_sub(self.bytes - bytes, Ordering::Relaxed)
                    - (self.bytes - bytes)
            }
        };
        budget
            .metrics
            .ext_proc
            .buffered_body_bytes
            .inc_by(bytes as i64 - self.bytes as i64);
        self.bytes = bytes;
        total > limit
    }
}

impl Drop for BodyBudgetShare {
    fn drop(&mut self) {
        self.set(0, usize::MAX);
    }
}

/// A body that counts against the budget until its last reference is dropped.
struct CountedBody {
    bytes: Bytes,
    _share: BodyBudgetShare,
}

impl AsRef<[u8]> for CountedBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl BodyBudget {
    /// Counts a whole body against the budget for as long as a reference to it exists. Returns
    /// `None` if all shares would exceed `limit`.
    pub(super) fn retain(self: &Arc<Self>, bytes: Bytes, limit: usize) -> Option<Bytes> {
        let mut share = self.share();
        let over = share.set(bytes.len(), limit);
        (!over).then(|| {
            Bytes::from_owner(CountedBody {
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
    fn body_counts_until_last_reference_is_dropped() {
        let metrics = Arc::new(Metrics::new());
        let budget = BodyBudget::new(metrics.clone());
        let body = budget.retain(Bytes::from_static(b"12345"), 8).unwrap();
        assert!(
            budget.retain(Bytes::from_static(b"1234"), 8).is_none(),
            "9 of 8"
        );
        let part = body.slice(1..3);
        drop(body);
        assert_eq!(
            (&*part, metrics.ext_proc.buffered_body_bytes.get()),
            (&b"23"[..], 5)
        );
        drop(part);
        assert_eq!(metrics.ext_proc.buffered_body_bytes.get(), 0);
    }

    #[test]
    fn shares_add_up_and_are_released() {
        let metrics = Arc::new(Metrics::new());
        let budget = BodyBudget::new(metrics.clone());
        let mut one = budget.share();
        let mut other = budget.share();
        assert!(!one.set(60, 100));
        assert!(other.set(50, 100), "110 of 100");
        assert!(!one.set(40, 100));
        assert_eq!(metrics.ext_proc.buffered_body_bytes.get(), 90);
        drop(one);
        assert_eq!(metrics.ext_proc.buffered_body_bytes.get(), 50);
        drop(other);
        assert_eq!(
            (
                metrics.ext_proc.buffered_body_bytes.get(),
                budget.bytes.load(Ordering::Relaxed)
            ),
            (0, 0)
        );
    }
}
