//! Estimate of bookings that peers have made but that have not arrived here yet. It is the arrival
//! rate multiplied by the propagation delay.

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
        let rates = self.kinds.entry(kind).or_default();
        let uncached = booking.prompt_tokens.saturating_sub(booking.cached_tokens);
        rates.bookings += 1.0;
        rates.prefill_tokens += if booking.track_prefill {
            uncached as f64
        } else {
            0.0
        };
        rates.blocks += booking.sequences.block_count() as f64;
    }

    /// Records the round-trip time of an echo message.
    pub(super) fn record_delay(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.delay = Some(
            self.delay
                .map_or(seconds, |delay| delay + (seconds - delay) / 8.0),
        );
    }

    /// Clears the rates and the delay after the connection was lost.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Returns the smoothed propagation delay in seconds.
    pub(super) fn delay(&self) -> Option<f64> {
        self.delay
    }

    /// Estimates the bookings in flight. `elapsed` is the time since the last call.
    /// `batch_interval` is the time for which senders collect a batch. `ranks` returns the number
    /// of worker ranks of a kind.
    pub(super) fn estimate(
        &mut self,
        elapsed: Duration,
        batch_interval: Duration,
        ranks: impl Fn(&BookingKind) -> usize,
    ) -> HashMap<BookingKind, InFlightEstimate> {
        let seconds = elapsed.as_secs_f64().max(1e-6);
        let weight = 1.0 - (-seconds / TIME_CONSTANT_SECS).exp();
        let delay = self.delay.unwrap_or_default() + batch_interval.as_secs_f64();
        let mut all = HashMap::new();
        for (kind, rates) in &mut self.kinds {
            let update_average = |rate: &mut f64, sum: &mut f64| {
                *rate += weight * (std::mem::take(sum) / seconds - *rate)
            };
            update_average(&mut rates.rate, &mut rates.bookings);
            update_average(&mut rates.prefill_token_rate, &mut rates.prefill_tokens);
            update_average(&mut rates.block_rate, &mut rates.blocks);
            let bookings = rates.rate * delay;
            if bookings >= MIN_BOOKINGS {
                let per_booking = |rate: f64| (rate / rates.rate).round() as u64;
                let prefill_tokens = per_booking(rates.prefill_token_rate);
                let blocks = per_booking(rates.block_rate);
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
            .retain(|_, rates| rates.rate * delay >= MIN_BOOKINGS / 1e3);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_core::load::PromptSequences;
    use warmroute_core::worker::{RankSlot, WorkerRank};

    fn booking(tokens: u64) -> LoadBooking {
        LoadBooking {
            slot: RankSlot(0),
            rank: WorkerRank::new(1, 0),
            sequences: (0..4)
                .map(warmroute_core::block::SequenceHash)
                .collect::<PromptSequences>(),
            prompt_tokens: tokens,
            cached_tokens: 10,
            track_prefill: true,
            prefill_time: None,
            content_time: None,
            end: BookingEnd::RequestEnd,
        }
    }

    #[test]
    fn estimate_is_rate_times_delay() {
        let mut rates = ArrivalRates::default();
        let kind = || (ModelName::from("m"), BookingEnd::RequestEnd);
        let estimate = |rates: &mut ArrivalRates| {
            rates.estimate(Duration::from_millis(100), Duration::from_millis(1), |_| 5)
        };
        assert_eq!(estimate(&mut rates), HashMap::new());
        rates.record_delay(Duration::from_millis(4));
        for _ in 0..100 {
            (0..40).for_each(|index| {
                rates.record_booking(kind(), &booking(if index % 2 == 0 { 110 } else { 310 }))
            });
            estimate(&mut rates);
        }
        (0..40).for_each(|_| rates.record_booking(kind(), &booking(210)));
        let in_flight = estimate(&mut rates)[&kind()];
        assert!(
            (in_flight.bookings - 400.0 * 0.005).abs() < 0.01,
            "{in_flight:?}"
        );
        assert_eq!(
            (in_flight.prefill_tokens, in_flight.blocks, in_flight.ranks),
            (200, 4, 5)
        );
        // The estimate returns to zero when no more bookings arrive.
        (0..200).for_each(|_| drop(estimate(&mut rates)));
        assert_eq!(estimate(&mut rates), HashMap::new());
        assert!(rates.kinds.is_empty(), "unused rates were retained");
    }
}
