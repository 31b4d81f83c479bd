//! What becomes of the bookings of this process, told as it happens, so that other routers of the same workers can count
//! them. Bookings that were told by others are not told again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Booking, LoadTracker, Reservation, Until};

/// Number of a reservation, unlike that of any other of the same tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BookingId(pub u64);

/// What became of a reservation.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// It was made.
    Booked {
        /// Its number.
        id: BookingId,
        /// What was booked.
        bookings: Vec<Booking>,
    },
    /// The first token of the answer came.
    FirstToken(BookingId),
    /// The answer filled more blocks; see [`Reservation::output_block`].
    OutputBlocks {
        /// Of which reservation.
        id: BookingId,
        /// How many.
        count: usize,
        /// What each block counts for from now on, if that is known.
        fraction: Option<f64>,
    },
    /// Its first booking counts somewhere else, or nowhere.
    Moved {
        /// Of which reservation.
        id: BookingId,
        /// What it is there.
        to: Option<Booking>,
    },
    /// It has ended.
    Released(BookingId),
}

/// A reservation that is alive, as somebody else has to know it who did not hear of it from the beginning.
#[derive(Clone, Debug, PartialEq)]
pub struct Live {
    /// What is booked.
    pub bookings: Vec<Booking>,
    /// Whether the first token of the answer came.
    pub begun: bool,
    /// Blocks of the answer that count in part.
    pub faded: usize,
    /// For how much each of these counts.
    pub fraction: Option<f64>,
    /// Blocks of the answer that count in full.
    pub whole: usize,
}

impl Live {
    /// Nothing has happened yet.
    pub fn new(bookings: Vec<Booking>) -> Self {
        Self {
            bookings,
            begun: false,
            faded: 0,
            fraction: None,
            whole: 0,
        }
    }

    /// Something else happened to it.
    pub fn apply(&mut self, news: &News) {
        match news {
            News::FirstToken(_) => {
                self.begun = true;
                // What lasts until then has ended.
                self.bookings.retain(|booking| booking.until == Until::End);
            }
            News::OutputBlocks {
                count, fraction, ..
            } => {
                self.whole += count;
                if fraction.is_some() {
                    self.faded += std::mem::take(&mut self.whole);
                    self.fraction = *fraction;
                }
            }
            News::Moved { to, .. } => match (self.bookings.first_mut(), to) {
                (Some(first), Some(to)) => *first = to.clone(),
                (Some(_), None) => drop(self.bookings.remove(0)),
                (None, _) => {}
            },
            News::Booked { .. } | News::Released(_) => {}
        }
    }

    /// Whether it stands as the other does, wherever the ranks are here.
    pub fn same(&self, other: &Live) -> bool {
        let like = |(a, b): (&Booking, &Booking)| {
            a.rank == b.rank
                && a.until == b.until
                && a.prompt_tokens == b.prompt_tokens
                && a.sequences == b.sequences
        };
        self.begun == other.begun
            && (self.faded, self.whole, self.fraction) == (other.faded, other.whole, other.fraction)
            && self.bookings.len() == other.bookings.len()
            && self.bookings.iter().zip(&other.bookings).all(like)
    }
}

pub(super) type Tell = Box<dyn Fn(News) + Send + Sync>;

impl LoadTracker {
    /// From now on `hear` is told what becomes of reservations that are made here, in an order that is right for each of
    /// them; it must be quick. Who called first is the one who hears.
    pub fn on_news(&self, hear: impl Fn(News) + Send + Sync + 'static) {
        self.news.set(Box::new(hear)).ok();
    }

    /// Counts what another router has booked, as far as it had come. `None`, and nothing is counted, if one of the ranks is
    /// not there.
    pub fn mirror(self: &Arc<Self>, live: &Live) -> Option<Reservation> {
        let mut table = self.table.lock();
        let now = (self.clock)();
        let shares = table.book(&live.bookings, now)?;
        drop(table);
        let mut mirrored =
            Reservation::new(self.clone(), live.bookings.clone(), Some(shares), None);
        if live.begun {
            mirrored.first_token();
        }
        mirrored.output_blocks(live.faded, live.fraction);
        mirrored.output_blocks(live.whole, None);
        Some(mirrored)
    }

    /// Tells of a reservation that was just made; its number, if anybody hears.
    pub(super) fn tell_booked(&self, bookings: &[Booking]) -> Option<BookingId> {
        let hear = self.news.get()?;
        let id = BookingId(self.numbers.fetch_add(1, Ordering::Relaxed));
        hear(News::Booked {
            id,
            bookings: bookings.to_vec(),
        });
        Some(id)
    }

    pub(super) fn tell(&self, news: News) {
        if let Some(hear) = self.news.get() {
            hear(news);
        }
    }
}
