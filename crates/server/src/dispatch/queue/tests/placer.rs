//! A placer with a number of slots. Without a free slot, it reports busy. A slot is released by
//! drop, like a reservation.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::dispatch::queue::config::QueueConfig;
use crate::dispatch::queue::{AdmissionQueue, BusyThreshold, PlaceOutcome, Placer, PrefillBacklog};

/// Places requests in slots.
pub(super) struct TestPlacer {
    slots: Arc<SlotCounter>,
    workers: Mutex<usize>,
}

/// The slots of a placer.
pub(super) struct SlotCounter {
    free: Mutex<usize>,
    queue: OnceLock<Weak<AdmissionQueue<TestPlacer>>>,
}

/// A placed request.
#[derive(Debug)]
pub(super) struct TestSlot {
    pub(super) name: &'static str,
    /// Number of refreshes.
    pub(super) refreshed: usize,
    slot_count: usize,
    slots: Arc<SlotCounter>,
}

impl std::fmt::Debug for SlotCounter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} free", self.free.lock())
    }
}

impl Drop for TestSlot {
    fn drop(&mut self) {
        self.slots.release(self.slot_count);
        self.slots.wake();
    }
}

impl SlotCounter {
    fn release(&self, slots: usize) {
        *self.free.lock() += slots;
    }

    fn wake(&self) {
        self.queue
            .get()
            .and_then(Weak::upgrade)
            .into_iter()
            .for_each(|queue| queue.wake());
    }
}

/// A request of a test.
#[derive(Debug, Default)]
pub(super) struct TestRequest {
    pub(super) name: &'static str,
    pub(super) behavior: PlaceBehavior,
    pub(super) refreshed: usize,
}

/// Behavior of an attempt to place a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum PlaceBehavior {
    /// Takes one slot.
    #[default]
    TakesOneSlot,
    /// Takes two slots.
    TakesTwoSlots,
    /// Reports busy this number of times, each time while a wake-up arrives.
    BusyAtWakeUp(u32),
    /// Panics if a slot is free.
    Panics,
}

impl From<&'static str> for TestRequest {
    fn from(name: &'static str) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }
}

impl TestPlacer {
    /// Returns a queue in front of one worker with this number of slots.
    pub(super) fn queue(
        slots: usize,
        config: &QueueConfig,
        prefill: PrefillBacklog,
    ) -> Arc<AdmissionQueue<TestPlacer>> {
        let slots = Arc::new(SlotCounter {
            free: Mutex::new(slots),
            queue: OnceLock::new(),
        });
        let pool = TestPlacer {
            slots: slots.clone(),
            workers: Mutex::new(1),
        };
        let queue = AdmissionQueue::new(Arc::new(pool), config, prefill);
        slots.queue.set(Arc::downgrade(&queue)).unwrap();
        queue
    }

    pub(super) fn free(&self) -> usize {
        *self.slots.free.lock()
    }

    /// Adds slots without a wake-up.
    pub(super) fn add_silently(&self, slots: usize) {
        self.slots.release(slots);
    }

    pub(super) fn add(&self, slots: usize) {
        self.add_silently(slots);
        self.slots.wake();
    }

    pub(super) fn set_workers(&self, workers: usize) {
        *self.workers.lock() = workers;
        self.slots.wake();
    }
}

impl Placer for TestPlacer {
    type Request = TestRequest;
    type Placed = TestSlot;
    type Error = &'static str;

    fn workers(&self) -> usize {
        *self.workers.lock()
    }

    fn place(
        &self,
        request: &mut TestRequest,
        threshold: &BusyThreshold,
    ) -> PlaceOutcome<TestSlot, &'static str> {
        if self.workers() == 0 {
            return PlaceOutcome::Refused("no worker");
        }
        if let PlaceBehavior::BusyAtWakeUp(times) = &mut request.behavior
            && *times > 0
        {
            *times -= 1;
            self.slots.wake();
            return PlaceOutcome::Busy;
        }
        let slot_count = if request.behavior == PlaceBehavior::TakesTwoSlots {
            2
        } else {
            1
        };
        let mut free = self.slots.free.lock();
        if *free < slot_count && !threshold.is_unset() {
            return PlaceOutcome::Busy;
        }
        assert!(
            request.behavior != PlaceBehavior::Panics,
            "panics on purpose"
        );
        *free = free.saturating_sub(slot_count);
        let slots = self.slots.clone();
        PlaceOutcome::Placed(TestSlot {
            name: request.name,
            refreshed: request.refreshed,
            slot_count,
            slots,
        })
    }

    fn refresh(&self, request: &mut TestRequest) {
        request.refreshed += 1;
        assert!(
            request.behavior != PlaceBehavior::Panics,
            "panics on purpose"
        );
    }
}
