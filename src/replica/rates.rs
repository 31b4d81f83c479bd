//! How many bookings of others are under way to us at any moment: as many as come in the time that a word takes.

use std::collections::HashMap;
use std::time::Duration;

use crate::load::{Booking, Until};
use crate::schedule::Unheard;
use crate::worker::ModelName;

/// What was long ago counts little: after so long a third.
const MEMORY: f64 = 1.0;

/// Fewer than this is none.
const NEXT_TO_NONE: f64 = 1e-3;

/// What is booked: workers of a model, for a prefill alone or for more.
pub(super) type Kind = (ModelName, Until);

/// What is known of the words that come.
#[derive(Debug, Default)]
pub(super) struct Rates {
    kinds: HashMap<Kind, Tally>,
    /// Seconds that a word takes.
    delay: Option<f64>,
}

/// Since the last look, and before.
#[derive(Debug, Default)]
struct Tally {
    bookings: f64,
    prefill_tokens: f64,
    blocks: f64,
    rate: f64,
    prefill_token_rate: f64,
    block_rate: f64,
}

impl Rates {
    /// A booking came.
    pub(super) fn note(&mut self, kind: Kind, booking: &Booking) {
        let tally = self.kinds.entry(kind).or_default();
        let uncached = booking.prompt_tokens.saturating_sub(booking.cached_tokens);
        tally.bookings += 1.0;
        tally.prefill_tokens += if booking.track_prefill {
            uncached as f64
        } else {
            0.0
        };
        tally.blocks += booking.sequences.blocks() as f64;
    }

    /// A word of ours came back after so long.
    pub(super) fn took(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.delay = Some(
            self.delay
                .map_or(seconds, |delay| delay + (seconds - delay) / 8.0),
        );
    }

    /// Nobody hears anybody.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Seconds that a word takes.
    pub(super) fn delay(&self) -> Option<f64> {
        self.delay
    }

    /// What is under way at any moment, where words are gathered for so long; `elapsed` since the last call.
    pub(super) fn look(
        &mut self,
        elapsed: Duration,
        gathered: Duration,
        ranks: impl Fn(&Kind) -> usize,
    ) -> HashMap<Kind, Unheard> {
        let seconds = elapsed.as_secs_f64().max(1e-6);
        let share = 1.0 - (-seconds / MEMORY).exp();
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
            if bookings >= NEXT_TO_NONE {
                let each = |rate: f64| (rate / tally.rate).round() as u64;
                let (prefill_tokens, blocks) =
                    (each(tally.prefill_token_rate), each(tally.block_rate));
                all.insert(
                    kind.clone(),
                    Unheard {
                        bookings,
                        prefill_tokens,
                        blocks,
                        ranks: ranks(kind),
                    },
                );
            }
        }
        self.kinds
            .retain(|_, tally| tally.rate * delay >= NEXT_TO_NONE / 1e3);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Sequences;
    use crate::worker::{DpRank, Slot, WorkerId, WorkerRank};

    fn booking(tokens: u64) -> Booking {
        Booking {
            slot: Slot(0),
            rank: WorkerRank {
                worker: WorkerId(1),
                rank: DpRank(0),
            },
            sequences: (0..4)
                .map(crate::block::SequenceHash)
                .collect::<Sequences>(),
            prompt_tokens: tokens,
            cached_tokens: 10,
            track_prefill: true,
            prefill_time: None,
            until: Until::End,
        }
    }

    #[test]
    fn as_many_are_under_way_as_come_in_the_time_of_a_word() {
        let (mut rates, kind) = (Rates::default(), || (ModelName::from("m"), Until::End));
        let look = |rates: &mut Rates| {
            rates.look(Duration::from_millis(100), Duration::from_millis(1), |_| 5)
        };
        assert_eq!(look(&mut rates), HashMap::new());
        rates.took(Duration::from_millis(4));
        for _ in 0..100 {
            (0..40)
                .for_each(|nth| rates.note(kind(), &booking(if nth % 2 == 0 { 110 } else { 310 })));
            look(&mut rates);
        }
        (0..40).for_each(|_| rates.note(kind(), &booking(210)));
        let found = look(&mut rates)[&kind()];
        assert!((found.bookings - 400.0 * 0.005).abs() < 0.01, "{found:?}");
        assert_eq!(
            (found.prefill_tokens, found.blocks, found.ranks),
            (200, 4, 5)
        );
        // And none once they have ceased.
        (0..200).for_each(|_| drop(look(&mut rates)));
        assert_eq!(look(&mut rates), HashMap::new());
        assert!(rates.kinds.is_empty(), "nothing is kept of what is no more");
    }
}
