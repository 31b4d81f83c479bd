//! Observations of running requests, from which the latency models learn.

use std::time::Instant;

use super::latency::{PrefillObservation, StepObservation};
use super::table::{LoadTable, ReservationPart, find_row};
use super::timing::RankTiming;
use crate::worker::{RankSlot, WorkerRank};

/// Complete answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompleteOutput {
    /// The answer was streamed.
    Stream {
        /// Number of its tokens, if known.
        tokens: Option<u64>,
    },
    /// The answer was one document, so the time of its first token is unknown.
    Unary {
        /// Number of its tokens.
        tokens: u64,
    },
}

impl LoadTable {
    /// Returns the booked work of a rank.
    #[inline(always)]
    pub(super) fn timing(
        &self,
        slot: RankSlot,
        rank: WorkerRank,
        now: Instant,
    ) -> Option<RankTiming> {
        let row = self.row(slot).filter(|row| row.rank == rank)?;
        Some(RankTiming {
            prefills: row.prefills.len() as u32,
            prefill_tokens: row.prefills.tokens() as f64,
            prefill_pairs: row.prefills.pairs(),
            prefill_elapsed: row.prefills.elapsed(now).as_secs_f64(),
            context_tokens: row.context_tokens as f64,
            prefill_factor: f64::from(row.factors.prefill),
            decode_factor: f64::from(row.factors.decode),
        })
    }

    /// Learns from the completed prefill of a part, once.
    pub(super) fn learn_prefill(&mut self, part: &mut ReservationPart) {
        let Some(elapsed) = part.prefill_elapsed.take() else {
            return;
        };
        let booking = &part.booking;
        let row = self
            .rows
            .get_mut(booking.slot.index())
            .and_then(Option::as_mut);
        if let Some(row) = row.filter(|row| row.rank == booking.rank) {
            let observation = PrefillObservation {
                work: booking.prefill_work(),
                elapsed,
            };
            row.learn(&mut self.latency, |model, speed| {
                model.observe_prefill(observation, speed);
            });
        }
    }

    /// Adds observed answer tokens. If the rank had no prefill since the tokens before, the elapsed
    /// time is that of decode steps.
    pub(super) fn add_output_tokens(
        &mut self,
        part: &mut ReservationPart,
        count: u64,
        now: Instant,
    ) {
        let Some(share) = &mut part.share else {
            return;
        };
        let since = share.answer.last_at.replace(now);
        let Some(row) = find_row(&mut self.rows, &part.booking, share) else {
            return;
        };
        let resident_tokens = row.context_tokens as f64;
        share.answer.tokens += count;
        row.context_tokens += count;
        if let Some(since) = since.filter(|since| row.prefills.is_idle_since(*since)) {
            let observation = StepObservation {
                resident_tokens,
                steps: count,
                elapsed: now.saturating_duration_since(since),
            };
            row.learn(&mut self.latency, |model, speed| {
                model.observe_steps(observation, speed);
            });
        }
    }

    /// Learns from a complete answer.
    pub(super) fn learn_output(
        &mut self,
        part: &mut ReservationPart,
        output: CompleteOutput,
        now: Instant,
    ) {
        let Some(share) = &mut part.share else {
            return;
        };
        let answer = share.answer;
        let Some(row) = find_row(&mut self.rows, &part.booking, share) else {
            return;
        };
        let elapsed = answer
            .started_at
            .map(|started_at| now.saturating_duration_since(started_at));
        let resident_tokens = row.context_tokens as f64;
        row.learn(&mut self.latency, |model, speed| match output {
            CompleteOutput::Unary { tokens } => model.observe_output(tokens as f64),
            CompleteOutput::Stream {
                tokens: Some(tokens),
            } => {
                model.observe_output(tokens as f64);
                // The tokens were not observed one by one. Their mean time includes the prefills
                // of other requests.
                if let Some(elapsed) = elapsed.filter(|_| answer.tokens == 0) {
                    let observation = StepObservation {
                        resident_tokens,
                        steps: tokens.saturating_sub(1),
                        elapsed,
                    };
                    model.observe_steps(observation, speed);
                }
            }
            // The cost depends only on the duration of an answer, so the duration divided by the
            // expected step time replaces the length.
            CompleteOutput::Stream { tokens: None } => {
                if let Some(elapsed) = elapsed {
                    model.observe_duration(elapsed, resident_tokens, speed.decode);
                }
            }
        });
    }
}
