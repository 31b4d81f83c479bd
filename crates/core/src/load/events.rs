//! Events about the reservations of this process, so that other replicas can count them. Mirrored
//! reservations of other replicas publish no events.

use super::booking::{BookingEnd, LoadBooking};

/// Id of a reservation, unique within a tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BookingId(pub u64);

/// Change of a reservation.
#[derive(Clone, Debug, PartialEq)]
pub enum ReservationEvent {
    /// The reservation was made.
    Booked {
        /// Id of the reservation.
        id: BookingId,
        /// Its bookings.
        bookings: Vec<LoadBooking>,
    },
    /// The first token of the answer arrived.
    FirstToken(BookingId),
    /// Output blocks were added; see
    /// [`Reservation::add_output_block`](super::Reservation::add_output_block).
    OutputBlocks {
        /// Id of the reservation.
        id: BookingId,
        /// Number of added blocks.
        count: usize,
        /// Weight of each block from now on, if known.
        fraction: Option<f64>,
    },
    /// The first booking moved to another rank, or was released.
    Moved {
        /// Id of the reservation.
        id: BookingId,
        /// The new booking, if there is one.
        to: Option<LoadBooking>,
    },
    /// The reservation ended.
    Released(BookingId),
}

/// Receives changes of the load. The methods must be fast.
pub trait LoadListener: Send + Sync {
    /// Handles a decrease of load: a prefill or a request ended, or a slot closed. The decay of an
    /// estimated prefill is not reported, so waiters must also poll. No lock is held during the
    /// call.
    fn on_capacity_freed(&self) {}

    /// Returns whether the listener receives the changes of the reservations made by this process.
    fn wants_reservation_events(&self) -> bool {
        false
    }

    /// Handles a change of a reservation made by this process. The events of one reservation arrive
    /// in order.
    fn on_reservation_event(&self, _event: ReservationEvent) {}
}

/// Ignores all changes.
impl LoadListener for () {}

/// State of an active reservation, for a replica that did not receive its events from the start.
#[derive(Clone, Debug, PartialEq)]
pub struct ReservationState {
    /// Current bookings.
    pub bookings: Vec<LoadBooking>,
    /// Whether the first token arrived.
    pub has_first_token: bool,
    /// Output blocks that count for `fraction` each.
    pub discounted_blocks: usize,
    /// Weight of each discounted block.
    pub fraction: Option<f64>,
    /// Output blocks that count in full.
    pub full_blocks: usize,
}

impl ReservationState {
    /// Creates the state right after booking.
    pub fn new(bookings: Vec<LoadBooking>) -> Self {
        Self {
            bookings,
            has_first_token: false,
            discounted_blocks: 0,
            fraction: None,
            full_blocks: 0,
        }
    }

    /// Applies a later event.
    pub fn apply(&mut self, event: &ReservationEvent) {
        match event {
            ReservationEvent::FirstToken(_) => {
                self.has_first_token = true;
                // Bookings of prefill workers end with the first token.
                self.bookings
                    .retain(|booking| booking.end == BookingEnd::RequestEnd);
            }
            ReservationEvent::OutputBlocks {
                count, fraction, ..
            } => {
                self.full_blocks += count;
                if fraction.is_some() {
                    self.discounted_blocks += std::mem::take(&mut self.full_blocks);
                    self.fraction = *fraction;
                }
            }
            ReservationEvent::Moved { to, .. } => match (self.bookings.first_mut(), to) {
                (Some(first), Some(to)) => *first = to.clone(),
                (Some(_), None) => drop(self.bookings.remove(0)),
                (None, _) => {}
            },
            ReservationEvent::Booked { .. } | ReservationEvent::Released(_) => {}
        }
    }

    /// Returns whether both states describe the same load. Slots are ignored, because each replica
    /// assigns its own.
    pub fn is_equivalent(&self, other: &ReservationState) -> bool {
        let is_same = |(a, b): (&LoadBooking, &LoadBooking)| {
            a.rank == b.rank
                && a.end == b.end
                && a.prompt_tokens == b.prompt_tokens
                && a.sequences == b.sequences
        };
        self.has_first_token == other.has_first_token
            && (self.discounted_blocks, self.full_blocks, self.fraction)
                == (other.discounted_blocks, other.full_blocks, other.fraction)
            && self.bookings.len() == other.bookings.len()
            && self.bookings.iter().zip(&other.bookings).all(is_same)
    }
}
