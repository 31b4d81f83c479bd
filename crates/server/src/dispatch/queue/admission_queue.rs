//! The queue with its lock and its clock: which requests are placed, and when.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tracing::error;
use warmroute_core::queue::{
    AdmissionError, BusyThreshold, ClassCounters, ClassId, ClassStatus, FairQueue, PlaceOutcome,
    Placer, QueueClass, QueueClasses, QueueEntry, QueueMetadata, QueueTicket,
};

use super::config::QueueConfig;

/// Maximum number of requests placed per pass, so that one waiting task does not place the requests
/// of all others.
pub(super) const MAX_PLACED_PER_PASS: usize = 16;

/// Result of placing a request.
pub type PlaceResult<P> = Result<<P as Placer>::Placed, AdmissionError<<P as Placer>::Error>>;

/// Behavior of outstanding prefill over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillBacklog {
    /// Changes only with an event. Overload marks and ejections still end by time.
    #[default]
    Fixed,
    /// Decays with time, without an event.
    Decaying,
}

impl PrefillBacklog {
    /// Returns the interval at which waiting requests are checked without a wake-up.
    fn recheck_interval(self) -> Duration {
        match self {
            Self::Fixed => Duration::from_secs(1),
            Self::Decaying => Duration::from_millis(100),
        }
    }
}

/// Queue in front of a [`Placer`].
pub struct AdmissionQueue<P: Placer> {
    pub(super) placer: Arc<P>,
    pub(super) classes: Arc<QueueClasses>,
    pub(super) settings: QueueSettings,
    pub(super) state: Mutex<QueueState<P>>,
    /// Number of wake-ups, so that one during a pass is not lost.
    pub(super) wake_count: AtomicU64,
    /// Number of queued requests, readable without the lock.
    pub(super) waiting: AtomicUsize,
    pub(super) wake_notify: Notify,
    pub(super) waiter_notify: Notify,
}

pub(super) struct QueueSettings {
    pub(super) busy_threshold: BusyThreshold,
    pub(super) deadline: Duration,
    pub(super) refresh_after: Duration,
    pub(super) retry_after: Duration,
    pub(super) recheck_interval: Duration,
}

pub(super) struct QueueState<P: Placer> {
    pub(super) queue: FairQueue<QueuedRequest<P>>,
    /// Value of `wake_count` that the last pass has handled.
    pub(super) processed_wakes: u64,
    pub(super) counters: Vec<ClassCounters>,
}

/// Queued request, with the channel for its result.
pub(super) struct QueuedRequest<P: Placer> {
    pub(super) request: P::Request,
    pub(super) refreshed_at: Instant,
    pub(super) result_tx: oneshot::Sender<PlaceResult<P>>,
}

pub(super) type DecidedRequests<P> = Vec<(QueuedRequest<P>, PlaceResult<P>)>;

impl<P: Placer> AdmissionQueue<P> {
    /// Creates an empty queue. `config` must have passed [`QueueConfig::problems`].
    pub fn new(placer: Arc<P>, config: &QueueConfig, prefill: PrefillBacklog) -> Arc<Self> {
        let classes = Arc::new(config.to_classes());
        let state = QueueState {
            queue: FairQueue::new(classes.clone(), Instant::now().into_std()),
            processed_wakes: 0,
            counters: classes.ids().map(|_| ClassCounters::default()).collect(),
        };
        Arc::new(Self {
            placer,
            classes,
            settings: QueueSettings {
                busy_threshold: config.busy_threshold(),
                deadline: config.timeout.get(),
                refresh_after: config.refresh_after.get(),
                retry_after: config.retry_after.get(),
                recheck_interval: prefill.recheck_interval(),
            },
            state: Mutex::new(state),
            wake_count: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            wake_notify: Notify::new(),
            waiter_notify: Notify::new(),
        })
    }

    /// Returns the placer.
    pub fn placer(&self) -> &Arc<P> {
        &self.placer
    }

    /// Returns the class that a request would wait in.
    pub(super) fn class_id(&self, metadata: &QueueMetadata) -> ClassId {
        self.classes
            .resolve(metadata.class.as_deref(), metadata.uncached_tokens())
    }

    /// Returns the class that a request would wait in.
    pub fn class_of(&self, metadata: &QueueMetadata) -> &QueueClass {
        self.classes.get(self.class_id(metadata))
    }

    /// Returns the threshold above which a worker is busy.
    pub fn busy_threshold(&self) -> BusyThreshold {
        self.settings.busy_threshold
    }

    /// Returns whether requests can be queued.
    pub fn may_wait(&self) -> bool {
        !self.settings.busy_threshold.is_unset()
    }

    /// Checks the queued requests again, because load decreased or the fleet changed. Cheap, and
    /// safe to call from anywhere.
    pub fn wake(&self) {
        // A request increments `waiting` before it tries to be placed. The caller of this function
        // has changed the load before `waiting` is read. Therefore at least one of the two observes
        // the other.
        self.wake_count.fetch_add(1, Ordering::SeqCst);
        self.notify_waiting();
    }

    /// Places queued requests after each wake-up and at a fixed interval. Runs until dropped.
    pub async fn run(&self) {
        let recheck = self.settings.recheck_interval;
        let mut clock = interval_at(Instant::now() + recheck, recheck);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.wake_notify.notified() => {}
                _ = clock.tick() => {
                    if self.waiting.load(Ordering::SeqCst) == 0 {
                        continue;
                    }
                    self.wake_count.fetch_add(1, Ordering::SeqCst);
                }
            }
            self.place_waiting();
        }
    }

    /// Returns the status of each class.
    pub fn class_statuses(&self) -> Vec<ClassStatus> {
        let state = self.state.lock();
        let status = |id: ClassId| ClassStatus {
            class: self.classes.get(id).name.clone(),
            depth: state.queue.depth(id),
            counters: state.counters[id.index()],
        };
        self.classes.ids().map(status).collect()
    }

    /// Places the queued requests that can be placed.
    pub(super) fn place_waiting(&self) {
        let decided = self.place_batch(&mut self.state.lock());
        deliver(decided);
    }

    /// Places queued requests in order. The caller delivers the results without the lock, because
    /// delivery may wake tasks and drop values.
    pub(super) fn place_batch(&self, state: &mut QueueState<P>) -> DecidedRequests<P> {
        // Read before the first attempt: a later wake-up causes another pass.
        let wake_count = self.wake_count.load(Ordering::SeqCst);
        if state.processed_wakes != wake_count {
            state.processed_wakes = wake_count;
            state.queue.unblock_all();
        }
        let mut decided = Vec::new();
        while decided.len() < MAX_PLACED_PER_PASS
            && let Some((entry, outcome)) =
                state.queue.place_next(|entry| self.try_place_queued(entry))
        {
            decided.push((entry.payload, outcome));
        }
        self.update_waiting(state);
        if decided.len() == MAX_PLACED_PER_PASS {
            self.notify_waiting();
        }
        decided
    }

    fn try_place_queued(&self, entry: &mut QueueEntry<QueuedRequest<P>>) -> Option<PlaceResult<P>> {
        let queued = &mut entry.payload;
        let refresh_after = self.settings.refresh_after;
        if !refresh_after.is_zero() && queued.refreshed_at.elapsed() >= refresh_after {
            queued.refreshed_at = Instant::now();
            let request = &mut queued.request;
            let refreshed = catch_unwind(AssertUnwindSafe(|| self.placer.refresh(request)));
            if refreshed.is_err() {
                error!("refreshing a queued request panicked");
            }
        }
        self.try_place(&mut queued.request)
    }

    /// Attempts to place a request. Returns `None` if all workers are busy. A panic fails this
    /// request only.
    pub(super) fn try_place(&self, request: &mut P::Request) -> Option<PlaceResult<P>> {
        let threshold = &self.settings.busy_threshold;
        match catch_unwind(AssertUnwindSafe(|| self.placer.place(request, threshold))) {
            Ok(PlaceOutcome::Placed(placed)) => Some(Ok(placed)),
            Ok(PlaceOutcome::Refused(error)) => Some(Err(AdmissionError::Refused(error))),
            Ok(PlaceOutcome::Busy) => None,
            Err(_) => {
                error!("placing a request panicked");
                Some(Err(AdmissionError::Panicked))
            }
        }
    }

    /// Removes a request at its deadline. Returns `None` if it has left the queue already.
    pub(super) fn expire(
        &self,
        ticket: QueueTicket,
        since: Instant,
    ) -> Option<AdmissionError<P::Error>> {
        let entry = self.remove(ticket, |counters| counters.expired += 1)?;
        let class = self.classes.get(entry.class).name.clone();
        Some(AdmissionError::DeadlineExceeded {
            class,
            waited: since.elapsed(),
            retry_after: self.settings.retry_after,
        })
    }

    /// Removes a request whose client has disconnected.
    pub(super) fn cancel(&self, ticket: QueueTicket) {
        self.remove(ticket, |counters| counters.cancelled += 1);
    }

    fn remove(
        &self,
        ticket: QueueTicket,
        count: impl FnOnce(&mut ClassCounters),
    ) -> Option<QueueEntry<QueuedRequest<P>>> {
        let mut state = self.state.lock();
        let entry = state.queue.remove(ticket)?;
        count(&mut state.counters[entry.class.index()]);
        self.update_waiting(&state);
        drop(state);
        // Requests queued behind the removed one may be placeable now.
        self.notify_waiting();
        Some(entry)
    }

    /// Publishes the number of queued requests.
    pub(super) fn update_waiting(&self, state: &QueueState<P>) {
        self.waiting.store(state.queue.len(), Ordering::SeqCst);
    }

    /// Notifies the background task and one waiting request, if there is one.
    pub(super) fn notify_waiting(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake_notify.notify_one();
            self.waiter_notify.notify_one();
        }
    }
}

/// Sends the results. If the client has disconnected, the result is dropped, which releases the
/// placement.
pub(super) fn deliver<P: Placer>(decided: DecidedRequests<P>) {
    for (queued, outcome) in decided {
        drop(queued.result_tx.send(outcome));
    }
}
