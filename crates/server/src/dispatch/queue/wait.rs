//! A queued request as a future. Dropping it removes the request from the queue.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use warmroute_core::queue::{AdmissionError, Placer, QueueTicket};

use super::admission_queue::{AdmissionQueue, PlaceResult};

/// Queued request. Dropping it removes the request from the queue.
#[must_use = "dropping it removes the request from the queue"]
pub struct QueueWait<P: Placer> {
    pub(super) queue: Arc<AdmissionQueue<P>>,
    pub(super) ticket: QueueTicket,
    pub(super) entered_at: Instant,
    pub(super) deadline: Instant,
    pub(super) result_rx: oneshot::Receiver<PlaceResult<P>>,
}

impl<P: Placer> QueueWait<P> {
    /// Returns the remaining time until the deadline. A caller under an Envoy message timeout
    /// requests all of it at once, because Envoy accepts only one extension.
    pub fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Waits for the placement. In the meantime, the task may also place other queued requests; see
    /// [`AdmissionQueue::wake`].
    pub async fn placement(mut self) -> PlaceResult<P> {
        let deadline = sleep_until(self.deadline);
        tokio::pin!(deadline);
        loop {
            tokio::select! {
                biased;
                result = &mut self.result_rx => return result.unwrap_or(Err(AdmissionError::Panicked)),
                () = &mut deadline => break,
                () = self.queue.waiter_notify.notified() => self.queue.place_waiting(),
            }
        }
        match self.queue.expire(self.ticket, self.entered_at) {
            Some(error) => Err(error),
            // The request left the queue at the same moment, and its result is being delivered.
            None => (&mut self.result_rx)
                .await
                .unwrap_or(Err(AdmissionError::Panicked)),
        }
    }
}

impl<P: Placer> Drop for QueueWait<P> {
    fn drop(&mut self) {
        self.queue.cancel(self.ticket);
    }
}
