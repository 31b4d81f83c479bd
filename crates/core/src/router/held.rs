//! Reservations of requests that failed before their first token. They are held for the expected
//! service time, so that a rank that fails at once does not appear less loaded than its peers.

use std::time::Instant;

use parking_lot::Mutex;

use crate::load::Reservation;

/// Maximum number of held reservations. Further ones are released at once.
const MAX_HELD: usize = 4096;

/// Reservations with the time of their release.
#[derive(Debug, Default)]
pub(super) struct HeldReservations(Mutex<Vec<(Instant, Reservation)>>);

impl HeldReservations {
    /// Holds a reservation until a time.
    pub(super) fn hold(&self, reservation: Reservation, until: Instant) {
        let mut held = self.0.lock();
        if held.len() < MAX_HELD {
            held.push((until, reservation));
        }
    }

    /// Releases the reservations whose time has passed.
    pub(super) fn release_expired(&self, now: Instant) {
        let expired: Vec<_> = self
            .0
            .lock()
            .extract_if(.., |(until, _)| *until <= now)
            .collect();
        drop(expired);
    }
}
