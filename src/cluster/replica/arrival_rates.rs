//! Estimate of bookings that peers have made but that have not arrived yet: arrival rate times
//! propagation delay.

use std::collections::HashMap;
use std::time::Duration;

use warmroute_core::load::{BookingEnd, LoadBooking};
use warmroute_core::policy::InFlightEstimate;
use warmroute_core::worker::ModelName;

/// Time constant of the exponential moving average, in seconds.
const TIME_CONSTANT_SECS: f64 = 1.0;

/// Estimates below this are treated as zero.
const MIN_BOOKINGS: f64 = 1e-3;

/// Model and phase of a booking.
pub(super) type BookingKind = (ModelName, BookingEnd);

/// Arrival rates of peer bookings, and the propagation delay of messages.
#[derive(Debug, Default)]
pub(super) struct ArrivalRates {
    kinds: HashMap<BookingKind, BookingRates>,
    /// Smoothed propagation delay, in seconds.
    delay: Option<f64>,
}

/// Sums since the last estimate, and smoothed rates per second.
#[derive(Debug, Default)]
struct BookingRates {
    bookings: f64,
    prefill_tokens: f64,
    blocks: f64,
    rate: f64,
    prefill_token_rate: f64,
    block_rate: f64,
}

impl ArrivalRates {
    /// Records an arrived booking.
    pub(super) fn record_booking(&mut self, kind: BookingKind, booking: &LoadBooking) {
        let tally = self.kinds.entry(kind).or_default();
        let uncached = booking.prompt_tokens.saturating_sub(booking.cached_tokens);
        tally.bookings += 1.0;
        tally.prefill_tokens += if booking.track_prefill {
            uncached as f64
        } else {
            0.0
        };
        tally.blocks += booking.sequences.block_count() as f64;
    }

    /// Records the round-trip time of an echo message.
    pub(super) fn record_delay(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.delay = Some(
            self.delay
                .map_or(seconds, |delay| delay + (seconds - delay) / 8.0),
        );
    }

    /// Clears all rates, after the connection was lost.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Smoothed propagation delay, in seconds.
    pub(super) fn delay(&self) -> Option<f64> {
        self.delay
    }

    /// Estimates the bookings in flight. `elapsed` is the time since the last call, `gathered` the
    /// batching interval of the senders.
    pub(super) fn estimate(
        &mut self,
        elapsed: Duration,
        gathered: Duration,
        ranks: impl Fn(&BookingKind) -> usize,
    ) -> HashMap<BookingKind, InFlightEstimate> {
        let seconds = elapsed.as_secs_f64().max(1e-6);
        let share = 1.0 - (-seconds / TIME_CONSTANT_SECS).exp();
        let delay = self.delay.unwrap_or_default() + gathered.as_secs_f64();
        let mut all = HashMap::new();
        for (kind, tally) in &mut self.kinds {
            let follow = |rate: &mut f64, sum: &mut f64| {
                *rate += share * (std::mem::take(sum) / seconds - *rate)
            };
            follow(&mut tally.rate, &mut tally.bookings);
            follow(&mut tally.prefill_token_rate, &mut tally.prefill_tokens);
            follow(&mut tally.block_rate, &mut tally.blocks);
            let bookings = tally.rate * delay;
            if bookings >= MIN_BOOKINGS {
                let each = |rate: f64| (rate / tally.rate).round() as u64;
                let prefill_tokens = each(tally.prefill_token_rate);
                let blocks = each(tally.block_rate);
                all.insert(
                    kind.clone(),
                    InFlightEstimate {
                        bookings,
                        prefill_tokens,
                        blocks,
                        ranks: ranks(kind),
                    },
                );
            }
        }
        self.kinds
            .retain(|_, tally| tally.rate * delay >= MIN_BOOKINGS / 1e3);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_core::load::PromptSequences;
    use warmroute_core::worker::{DpRank, RankSlot, WorkerId, WorkerRank};

    fn booking(tokens: u64) -> LoadBooking {
        LoadBooking {
            slot: RankSlot(0),
            rank: WorkerRank {
                worker: WorkerId(1),
                rank: DpRank(0),
            },
            sequences: (0..4)
                .map(warmroute_core::block::SequenceHash)
                .collect::<PromptSequences>(),
            prompt_tokens: tokens,
            cached_tokens: 10,
            track_prefill: true,
            prefill_time: None,
            end: BookingEnd::RequestEnd,
        }
    }

    #[test]
    fn estimate_is_rate_times_delay() {
        let mut rates = ArrivalRates::default();
        let kind = || (ModelName::from("m"), BookingEnd::RequestEnd);
        let look = |rates: &mut ArrivalRates| {
            rates.estimate(Duration::from_millis(100), Duration::from_millis(1), |_| 5)
        };
        assert_eq!(look(&mut rates), HashMap::new());
        rates.record_delay(Duration::from_millis(4));
        for _ in 0..100 {
            (0..40).for_each(|nth| {
                rates.record_booking(kind(), &booking(if nth % 2 == 0 { 110 } else { 310 }))
            });
            look(&mut rates);
        }
        (0..40).for_each(|_| rates.record_booking(kind(), &booking(210)));
        let found = look(&mut rates)[&kind()];
        assert!((found.bookings - 400.0 * 0.005).abs() < 0.01, "{found:?}");
        assert_eq!(
            (found.prefill_tokens, found.blocks, found.ranks),
            (200, 4, 5)
        );
        // The estimate returns to zero when no more bookings arrive.
        (0..200).for_each(|_| drop(look(&mut rates)));
        assert_eq!(look(&mut rates), HashMap::new());
        assert!(rates.kinds.is_empty(), "no rates are retained");
    }
}
