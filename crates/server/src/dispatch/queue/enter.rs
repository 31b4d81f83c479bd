//! Entry of a request: placed or rejected at once, or queued. A queued request is a future.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use warmroute_core::queue::{
    AdmissionError, ClassId, Placer, QueueEntry, QueueMetadata, QueueOverflow, QueueTicket,
};

use super::admission_queue::{AdmissionQueue, PlaceResult, QueuedRequest, deliver};

/// Result of entering the queue.
pub enum EnterOutcome<P: Placer> {
    /// The request was placed or rejected at once.
    Done(PlaceResult<P>),
    /// The request is queued.
    Queued(QueueWait<P>),
}

impl<P: Placer> AdmissionQueue<P> {
    /// Places a request at once, or queues it.
    pub fn enter(
        self: &Arc<Self>,
        mut request: P::Request,
        metadata: QueueMetadata,
    ) -> EnterOutcome<P> {
        let class = self.class_id(&metadata);
        if self.can_bypass()
            && let Some(outcome) = self.try_place(&mut request)
        {
            return EnterOutcome::Done(outcome);
        }
        self.enqueue(request, metadata, class)
    }

    /// Returns whether a request may skip the queue: there is no threshold, the queue is empty, or
    /// there are no workers.
    fn can_bypass(&self) -> bool {
        !self.may_wait() || self.waiting.load(Ordering::SeqCst) == 0 || self.placer.workers() == 0
    }

    fn enqueue(
        self: &Arc<Self>,
        request: P::Request,
        metadata: QueueMetadata,
        class: ClassId,
    ) -> EnterOutcome<P> {
        let workers = self.placer.workers();
        let now = Instant::now();
        let (result_tx, mut result_rx) = oneshot::channel();
        let entry = QueueEntry {
            metadata,
            class,
            arrived_at: now.into_std(),
            payload: QueuedRequest {
                request,
                refreshed_at: now,
                result_tx,
            },
        };
        let mut state = self.state.lock();
        let overflow = state.queue.find_overflow(class, workers);
        let ticket = state.queue.push(entry);
        self.update_waiting(&state);
        let decided = self.place_batch(&mut state);
        // A request that was placed in this pass is neither counted nor rejected.
        let overflow = overflow.filter(|_| state.queue.contains(ticket));
        let removed = overflow.and_then(|overflow| {
            state.counters[class.index()].count_overflow(overflow.kind);
            state.queue.remove(ticket)
        });
        state.counters[class.index()].waited += u64::from(state.queue.contains(ticket));
        self.update_waiting(&state);
        drop(state);
        deliver(decided);
        if let Some(overflow) = overflow {
            // Requests queued behind the removed one may be placeable now.
            self.notify_waiting();
            drop(removed);
            return EnterOutcome::Done(Err(self.overflow_error(class, overflow)));
        }
        match result_rx.try_recv() {
            Ok(outcome) => EnterOutcome::Done(outcome),
            Err(_) => EnterOutcome::Queued(QueueWait {
                queue: self.clone(),
                ticket,
                entered_at: now,
                deadline: now + self.settings.deadline,
                result_rx,
            }),
        }
    }

    fn overflow_error(&self, class: ClassId, overflow: QueueOverflow) -> AdmissionError<P::Error> {
        AdmissionError::Overflow {
            class: self.classes.get(class).name.clone(),
            kind: overflow.kind,
            current: overflow.current,
            limit: overflow.limit,
            retry_after: self.settings.retry_after,
        }
    }
}

/// Queued request. Dropping it removes the request from the queue.
#[must_use = "dropping it removes the request from the queue"]
pub struct QueueWait<P: Placer> {
    queue: Arc<AdmissionQueue<P>>,
    ticket: QueueTicket,
    entered_at: Instant,
    deadline: Instant,
    result_rx: oneshot::Receiver<PlaceResult<P>>,
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
