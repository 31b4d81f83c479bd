//! Workers with a number of seats: busy when none is free, and a seat is given back by drop, as a reservation is.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::admission::config::QueueConfig;
use crate::admission::{Admission, Attempt, Gate, Placing, Prefill};

pub(super) struct Pool {
    seats: Arc<Seats>,
    workers: Mutex<usize>,
}

pub(super) struct Seats {
    free: Mutex<usize>,
    admission: OnceLock<Weak<Admission<Pool>>>,
}

#[derive(Debug)]
pub(super) struct Seat {
    pub(super) name: &'static str,
    /// How often the caches were asked again.
    pub(super) refreshed: usize,
    takes: usize,
    seats: Arc<Seats>,
}

impl std::fmt::Debug for Seats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} free", self.free.lock())
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.free_silently(self.takes);
        self.seats.nudge();
    }
}

impl Seats {
    fn free_silently(&self, seats: usize) {
        *self.free.lock() += seats;
    }

    fn nudge(&self) {
        self.admission
            .get()
            .and_then(Weak::upgrade)
            .into_iter()
            .for_each(|admission| admission.nudge());
    }
}

#[derive(Debug, Default)]
pub(super) struct Job {
    pub(super) name: &'static str,
    pub(super) does: Does,
    pub(super) refreshed: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Does {
    #[default]
    Fits,
    /// Takes two seats.
    TakesTwo,
    /// Finds the seats taken so many times, each time at the very moment when one comes free.
    ComesEarly(u32),
    /// Panics once there is room for it.
    Panics,
}

impl From<&'static str> for Job {
    fn from(name: &'static str) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }
}

impl Pool {
    /// One worker with some seats, and its waiting room.
    pub(super) fn room(
        seats: usize,
        config: &QueueConfig,
        prefill: Prefill,
    ) -> Arc<Admission<Pool>> {
        let seats = Arc::new(Seats {
            free: Mutex::new(seats),
            admission: OnceLock::new(),
        });
        let pool = Pool {
            seats: seats.clone(),
            workers: Mutex::new(1),
        };
        let admission = Admission::new(Arc::new(pool), config, prefill);
        seats.admission.set(Arc::downgrade(&admission)).unwrap();
        admission
    }

    pub(super) fn free(&self) -> usize {
        *self.seats.free.lock()
    }

    /// More room, of which nobody tells.
    pub(super) fn add_silently(&self, seats: usize) {
        self.seats.free_silently(seats);
    }

    pub(super) fn add(&self, seats: usize) {
        self.add_silently(seats);
        self.seats.nudge();
    }

    pub(super) fn set_workers(&self, workers: usize) {
        *self.workers.lock() = workers;
        self.seats.nudge();
    }
}

impl Placing for Pool {
    type Request = Job;
    type Placed = Seat;
    type Refusal = &'static str;

    fn workers(&self) -> usize {
        *self.workers.lock()
    }

    fn place(&self, request: &mut Job, gate: &Gate) -> Attempt<Seat, &'static str> {
        if self.workers() == 0 {
            return Attempt::Refused("no worker");
        }
        if let Does::ComesEarly(times) = &mut request.does
            && *times > 0
        {
            *times -= 1;
            self.seats.nudge();
            return Attempt::Busy;
        }
        let takes = if request.does == Does::TakesTwo { 2 } else { 1 };
        let mut free = self.seats.free.lock();
        if *free < takes && !gate.never_busy() {
            return Attempt::Busy;
        }
        assert!(request.does != Does::Panics, "as it was told");
        *free = free.saturating_sub(takes);
        let seats = self.seats.clone();
        Attempt::Placed(Seat {
            name: request.name,
            refreshed: request.refreshed,
            takes,
            seats,
        })
    }

    fn refresh(&self, request: &mut Job) {
        request.refreshed += 1;
        assert!(request.does != Does::Panics, "as it was told");
    }
}
