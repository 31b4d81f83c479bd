//! Observations of running requests, from which the latency models learn.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::booking::LoadBooking;
use super::latency::{
    DecodeBatch, FirstTokenObservation, LatencyRegistry, ModelId, ModelLatency, PrefillObservation,
    RankSlowdown, StepObservation, TransferObservation,
};
use super::table::{LoadTable, RankRow, ReservationPart};
use super::timing::RankTiming;
use crate::worker::{RankSlot, WorkerRank};

/// Source of the number of cached tokens of a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachedTokenSource {
    /// From exact events, or 0 because no rank is expected to have a part of the prompt.
    Known,
    /// From a predicted cache. The engine may report another number.
    Predicted,
}

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
    /// Normalizes and compares the factors of the ranks of each model. Done once for as many bookings
    /// as there are rows, so the cost per booking is that of one row.
    pub(super) fn compare_ranks(&mut self) {
        self.uncompared_bookings = 0;
        let mut by_model: HashMap<ModelId, Vec<&mut RankSlowdown>> = HashMap::new();
        for row in self.rows.iter_mut() {
            let ranks = by_model.entry(row.model).or_default();
            ranks.push(&mut row.slowdown);
        }
        for (model, mut ranks) in by_model {
            self.latency.model_mut(model).compare_ranks(&mut ranks);
        }
        for row in self.rows.iter_mut() {
            row.update_factors(&self.latency);
        }
    }

    /// Returns the booked work of a rank, for a decision. If the rank is slower than others and a
    /// trial is due, its factors are those of the fastest rank.
    #[inline(always)]
    pub(super) fn timing(
        &self,
        slot: RankSlot,
        rank: WorkerRank,
        now: Instant,
    ) -> Option<RankTiming> {
        let row = self.row(slot).filter(|row| row.rank == rank)?;
        let mut timing = row.timing(now);
        let model = self.latency.model(row.model);
        // The fields of the trials are in other cache lines, which are usually not read.
        if timing.prefills == 0
            && model.may_try(row.factors)
            && let Some(trial) =
                model.trial_factors(&row.slowdown, timing.context_tokens == 0.0, now)
        {
            timing.prefill_factor = f64::from(trial.prefill);
            timing.decode_factor = f64::from(trial.decode);
        }
        Some(timing)
    }

    /// Records the completed prefill of a part, once. Learns from it if the number of cached tokens
    /// is known. Returns the predicted and observed times to first token.
    pub(super) fn learn_prefill(
        &mut self,
        part: &mut ReservationPart,
        cached: CachedTokenSource,
        now: Instant,
    ) -> Option<FirstTokenObservation> {
        let completed = part.completed_prefill.take()?;
        let mut first_token = FirstTokenObservation {
            predicted: completed.first_token_seconds,
            observed: completed.since_booking.as_secs_f64(),
            predicted_saving: 0.0,
        };
        let prefill = PrefillObservation {
            work: part.booking.prefill_work(),
            elapsed: completed.elapsed,
            at: now,
        };
        let cached_work = part.booking.cached_work();
        self.update_latency(&part.booking, |model, slowdown| {
            // If the rank has other requests, a late first token can have other causes.
            if completed.was_idle {
                first_token.predicted_saving = model.prefill_compute_seconds(cached_work, slowdown);
            }
            model.observe_first_token(first_token, slowdown);
            match cached {
                CachedTokenSource::Known => model.observe_prefill(prefill, slowdown),
                CachedTokenSource::Predicted => part.pending_prefill = Some(completed.elapsed),
            }
        })?;
        Some(first_token)
    }

    /// Learns from a prefill with a predicted number of cached tokens, once. `cached` is the number
    /// that the engine reports.
    pub(super) fn apply_reported_cached_tokens(
        &mut self,
        part: &mut ReservationPart,
        cached: u64,
        now: Instant,
    ) {
        let Some(elapsed) = part.pending_prefill.take() else {
            return;
        };
        let prefill = PrefillObservation {
            work: part.booking.prefill_work_after(cached),
            elapsed,
            at: now,
        };
        self.update_latency(&part.booking, |model, slowdown| {
            model.observe_prefill(prefill, slowdown);
        });
    }

    /// Updates the latency model of the rank of a booking. Returns `None` if the rank has left the
    /// fleet.
    fn update_latency(
        &mut self,
        booking: &LoadBooking,
        learn: impl FnOnce(&mut ModelLatency, &mut RankSlowdown),
    ) -> Option<()> {
        let row = self.rows.get_mut(booking.slot)?;
        (row.rank == booking.rank).then(|| row.learn(&mut self.latency, learn))
    }

    /// Sets the slowdown of a rank that has no observations yet, or keeps it for a rank that joins
    /// later.
    pub(super) fn restore_slowdown(
        &mut self,
        rank: WorkerRank,
        model: ModelId,
        slowdown: RankSlowdown,
    ) {
        let mut rows = self.rows.iter_mut();
        match rows.find(|row| row.rank == rank && row.model == model) {
            Some(row) if row.slowdown.observations() == 0 => {
                row.slowdown = slowdown;
                row.update_factors(&self.latency);
            }
            Some(_) => {}
            None => self.latency.store_departed_slowdown(rank, model, slowdown),
        }
    }

    /// Learns from the first token of a part whose prompt was transferred from a prefill worker.
    pub(super) fn learn_transfer(&mut self, part: &ReservationPart, elapsed: Duration) {
        let booking = &part.booking;
        let Some((_, row)) = part
            .share
            .as_ref()
            .and_then(|share| self.rows.find(booking, share))
        else {
            return;
        };
        let observation = TransferObservation {
            tokens: booking.uncached_tokens() as f64,
            batch: row.decode_batch(),
            elapsed,
        };
        row.learn(&mut self.latency, |model, slowdown| {
            model.observe_transfer(observation, slowdown);
        });
    }

    /// Adds observed answer tokens. If the rank had no prefill since the previous tokens, the
    /// elapsed time is that of decode steps.
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
        let Some((_, row)) = self.rows.find(&part.booking, share) else {
            return;
        };
        let batch = row.decode_batch();
        share.answer.tokens += count;
        row.context_tokens += count;
        if let Some(since) = since.filter(|since| row.prefills.is_idle_since(*since)) {
            let observation = StepObservation {
                batch,
                steps: count,
                elapsed: now.saturating_duration_since(since),
                at: now,
            };
            row.learn(&mut self.latency, |model, slowdown| {
                model.observe_steps(observation, slowdown);
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
        let Some((_, row)) = self.rows.find(&part.booking, share) else {
            return;
        };
        let elapsed = answer
            .started_at
            .map(|started_at| now.saturating_duration_since(started_at));
        let batch = row.decode_batch();
        row.learn(&mut self.latency, |model, slowdown| match output {
            CompleteOutput::Unary { tokens } => model.observe_output(tokens as f64, slowdown),
            CompleteOutput::Stream {
                tokens: Some(tokens),
            } => {
                model.observe_output(tokens as f64, slowdown);
                // The tokens were not observed one by one. Their mean time includes the prefills
                // of other requests.
                if let Some(elapsed) = elapsed.filter(|_| answer.tokens == 0) {
                    let observation = StepObservation {
                        batch,
                        steps: tokens.saturating_sub(1),
                        elapsed,
                        at: now,
                    };
                    model.observe_steps(observation, slowdown);
                }
            }
            // The cost depends only on the duration of an answer, so the duration divided by the
            // expected step time replaces the length.
            CompleteOutput::Stream { tokens: None } => {
                if let Some(elapsed) = elapsed {
                    model.observe_duration(elapsed, batch, slowdown);
                }
            }
        });
    }
}

impl RankRow {
    /// Learns with the latency model of the rank.
    pub(super) fn learn(
        &mut self,
        latency: &mut LatencyRegistry,
        learn: impl FnOnce(&mut ModelLatency, &mut RankSlowdown),
    ) {
        learn(latency.model_mut(self.model), &mut self.slowdown);
        self.update_factors(latency);
    }

    /// Updates the factors that decisions use.
    pub(super) fn update_factors(&mut self, latency: &LatencyRegistry) {
        let model = latency.model(self.model);
        self.factors = model.decision_factors(&self.slowdown);
    }

    /// Returns the size of a decode step with all requests of the rank.
    fn decode_batch(&self) -> DecodeBatch {
        DecodeBatch {
            requests: f64::from(self.requests),
            context_tokens: self.context_tokens as f64,
        }
    }

    /// Returns the booked work of the rank.
    #[inline(always)]
    pub(super) fn timing(&self, now: Instant) -> RankTiming {
        let idle = RankTiming {
            context_tokens: self.context_tokens as f64,
            prefill_factor: f64::from(self.factors.prefill),
            decode_factor: f64::from(self.factors.decode),
            ..RankTiming::default()
        };
        // The other fields of the queue are in a cache line of their own.
        if self.prefills.tokens() == 0 {
            return idle;
        }
        RankTiming {
            prefills: self.prefills.len() as u32,
            prefill_tokens: self.prefills.tokens() as f64,
            prefill_pairs: self.prefills.pairs(),
            prefill_elapsed: self.prefills.elapsed(now).as_secs_f64(),
            delay: self.prefills.delay(now).as_secs_f64(),
            ..idle
        }
    }
}
