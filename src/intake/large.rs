//! A lane for large bodies at the threads that encode: however many of them come, one thread is left to others.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes from which on a body is large: one takes ten milliseconds and more, as many as a hundred usual ones.
const LARGE: usize = 256 << 10;

/// The lane.
pub(super) struct LargeBodies {
    threads: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

/// What a body holds until it is encoded.
pub(super) enum Lane {
    /// Nothing: it is not large.
    Free,
    /// A place among the large ones that wait, and one of their threads.
    Large { _place: OwnedSemaphorePermit, _thread: OwnedSemaphorePermit },
}

impl LargeBodies {
    /// A lane to all but one of the threads, in which half of the queue may wait.
    pub(super) fn new(threads: usize, queue: usize) -> Self {
        let semaphore = |permits: usize| Arc::new(Semaphore::new(permits.clamp(1, Semaphore::MAX_PERMITS)));
        Self { threads: semaphore(threads.saturating_sub(1)), places: semaphore(queue / 2) }
    }

    /// The turn of a body of so many bytes; nothing where too many wait.
    pub(super) async fn turn(&self, bytes: usize) -> Option<Lane> {
        if bytes <= LARGE {
            return Some(Lane::Free);
        }
        let place = self.places.clone().try_acquire_owned().ok()?;
        let thread = self.threads.clone().acquire_owned().await.ok()?;
        Some(Lane::Large { _place: place, _thread: thread })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn large_bodies_leave_one_thread_and_half_of_queue() {
        let large = LargeBodies::new(3, 6);
        let first = large.turn(LARGE + 1).await;
        let second = large.turn(LARGE + 1).await;
        assert!(first.is_some() && second.is_some());
        let third = large.turn(LARGE + 1);
        tokio::pin!(third);
        let soon = tokio::time::timeout(Duration::from_millis(20), &mut third).await;
        assert!(soon.is_err(), "the last thread is for others");
        assert!(large.turn(LARGE + 1).await.is_none(), "three places are all");
        assert!(matches!(large.turn(LARGE).await, Some(Lane::Free)));
        drop(first);
        assert!(third.await.is_some());
    }
}
