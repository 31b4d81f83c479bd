//! Learned durations of prefills.

use std::time::Duration;

use dashmap::DashMap;

use super::phase_plan::PhasePlan;
use crate::fleet::FleetMember;
use crate::load::LoadBooking;
use crate::load::prefill_time::PrefillTimeModel;
use crate::worker::{ModelName, WorkerRole};

/// Prefill time models, per model and role.
#[derive(Debug, Default)]
pub(super) struct PrefillDurations(DashMap<(ModelName, WorkerRole), PrefillTimeModel>);

impl PrefillDurations {
    /// Sets the estimated prefill times of all bookings of a plan.
    pub(super) fn estimate_all(&self, plan: &PhasePlan<'_>, bookings: &mut [LoadBooking]) {
        for (member, booking) in plan.booked_members().zip(bookings) {
            self.estimate_one(member, booking);
        }
    }

    /// Sets the estimated prefill time of one booking.
    pub(super) fn estimate_one(&self, member: &FleetMember, booking: &mut LoadBooking) {
        let worker = &member.worker;
        let tokens = booking.prompt_tokens.saturating_sub(booking.cached_tokens);
        let key = (worker.model.clone(), worker.role);
        booking.prefill_time = self.0.get(&key).and_then(|model| model.estimate(tokens));
    }

    /// Records the duration of one booking's prefill on a member.
    pub(super) fn record(&self, member: &FleetMember, booking: &LoadBooking, time: Duration) {
        let key = (member.worker.model.clone(), member.worker.role);
        let tokens = booking.prompt_tokens.saturating_sub(booking.cached_tokens);
        self.0.entry(key).or_default().observe(tokens, time);
    }

    /// Returns the mean relative error of the estimates, per model and role.
    pub(super) fn errors(&self) -> Vec<(ModelName, WorkerRole, f64)> {
        let models = self.0.iter();
        models
            .filter_map(|entry| {
                let (model, role) = entry.key().clone();
                Some((model, role, entry.relative_error()?))
            })
            .collect()
    }
}
