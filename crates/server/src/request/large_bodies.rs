//! Limits the encoder threads that large bodies use, so that one thread is always left for other
//! bodies.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Size above which a body is large, in bytes. Encoding it takes ten milliseconds or more, as long
/// as a hundred usual bodies.
const LARGE_BODY_BYTES: usize = 256 << 10;

/// The permits of large bodies.
pub(super) struct LargeBodies {
    threads: Arc<Semaphore>,
    queue: Arc<Semaphore>,
}

/// The permit that a body holds until it is encoded.
pub(super) enum LargeBodySlot {
    /// No permit, because the body is not large.
    Free,
    /// One slot in the queue of large bodies, and one of their threads.
    Large {
        _slot: OwnedSemaphorePermit,
        _thread: OwnedSemaphorePermit,
    },
}

impl LargeBodies {
    /// Creates permits for all threads but one, and for half of the queue.
    pub(super) fn new(threads: usize, queue: usize) -> Self {
        let semaphore =
            |permits: usize| Arc::new(Semaphore::new(permits.clamp(1, Semaphore::MAX_PERMITS)));
        Self {
            threads: semaphore(threads.saturating_sub(1)),
            queue: semaphore(queue / 2),
        }
    }

    /// Waits for the permit of a body of this size. Returns `None` if too many bodies wait.
    pub(super) async fn acquire(&self, bytes: usize) -> Option<LargeBodySlot> {
        if bytes <= LARGE_BODY_BYTES {
            return Some(LargeBodySlot::Free);
        }
        let slot = self.queue.clone().try_acquire_owned().ok()?;
        let thread = self.threads.clone().acquire_owned().await.ok()?;
        Some(LargeBodySlot::Large {
            _slot: slot,
            _thread: thread,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn large_bodies_leave_capacity_for_small_bodies() {
        let large = LargeBodies::new(3, 6);
        let first = large.acquire(LARGE_BODY_BYTES + 1).await;
        let second = large.acquire(LARGE_BODY_BYTES + 1).await;
        assert!(first.is_some() && second.is_some());
        let third = large.acquire(LARGE_BODY_BYTES + 1);
        tokio::pin!(third);
        let soon = tokio::time::timeout(Duration::from_millis(20), &mut third).await;
        assert!(soon.is_err(), "the last thread is for others");
        assert!(
            large.acquire(LARGE_BODY_BYTES + 1).await.is_none(),
            "all three queue slots are in use"
        );
        assert!(matches!(
            large.acquire(LARGE_BODY_BYTES).await,
            Some(LargeBodySlot::Free)
        ));
        drop(first);
        assert!(third.await.is_some());
    }
}
