//! Life cycle of the predictions of one request: in flight, confirmed by the response, or removed.

use super::phase_plan::PhasePlan;
use super::placement::Placement;
use super::predictions::{PredictionPhase, PromptPrediction, RequestPredictions, RoutedPrompts};
use super::state::Router;
use crate::block::{BlockHashes, LocalHash};
use crate::fleet::FleetMember;

impl Router {
    /// Records prompts that are sent to a rank, if its cache is predicted.
    pub(super) fn predict(
        &self,
        member: &FleetMember,
        prompts: &[BlockHashes],
    ) -> Option<Box<PromptPrediction>> {
        let in_flight = self.lookup.predictors.record_in_flight(member, prompts);
        let phase = PredictionPhase::InFlight(in_flight);
        self.lookup.predictors.covers(member).then(|| {
            Box::new(PromptPrediction {
                member: member.clone(),
                phase,
            })
        })
    }

    /// Records that the engine accepted the request: its prompts count as cached there, and the
    /// listener is notified.
    pub(super) fn confirm(&self, prediction: &mut PromptPrediction, prompts: &[BlockHashes]) {
        let PredictionPhase::InFlight(in_flight) = &mut prediction.phase else {
            return;
        };
        let in_flight = std::mem::take(in_flight);
        let leases = in_flight
            .into_iter()
            .zip(prompts.iter().cycle())
            .map(|(prompt, hashes)| prompt.confirm(hashes));
        prediction.phase = PredictionPhase::Confirmed(leases.collect());
        if prompts.iter().any(|hashes| !hashes.is_empty()) {
            self.feedback
                .listener
                .on_routed(&prediction.member, prompts);
        }
    }

    /// Confirms the predictions of a request, for a caller that does not report the response
    /// status.
    pub fn confirm_predictions(&self, placement: &mut Placement) {
        let Placement {
            predictions,
            prompts,
            ..
        } = placement;
        let both = predictions
            .answering
            .iter_mut()
            .chain(&mut predictions.prefilling);
        both.for_each(|prediction| self.confirm(prediction, prompts));
    }

    /// Applies the response status. Success confirms the predictions; any other status removes
    /// them.
    pub fn resolve_predictions(&self, placement: &mut Placement, status: u16) {
        match status {
            200..300 => self.confirm_predictions(placement),
            _ => placement.predictions = RequestPredictions::default(),
        }
    }

    /// Records that the prefill worker of a request has computed its prompts.
    pub fn confirm_prefill(&self, placement: &mut Placement) {
        let Placement {
            predictions,
            prompts,
            ..
        } = placement;
        predictions
            .prefilling
            .iter_mut()
            .for_each(|prediction| self.confirm(prediction, prompts));
    }

    /// Records prompts that another replica has routed. The end of their requests is not known
    /// here, so their blocks may be evicted before unused ones, but not before older ones.
    pub fn record_remote_route(&self, routed: RoutedPrompts) {
        let fleet = self.fleet();
        let member = fleet.slot(routed.rank).and_then(|slot| fleet.member(slot));
        let Some(member) = member.filter(|member| member.worker.block_size == routed.block_size)
        else {
            return;
        };
        let hashes = |locals: Vec<LocalHash>| {
            let tokens = locals.len().saturating_mul(routed.block_size.tokens());
            BlockHashes::from_locals(tokens, routed.block_size, locals)
        };
        let prompts: Vec<BlockHashes> = routed.prompts.into_iter().map(hashes).collect();
        self.lookup.predictors.record(member, &prompts);
    }

    /// Returns the booked members whose cache is predicted.
    pub(super) fn predicted_members(&self, plan: &PhasePlan<'_>) -> Vec<FleetMember> {
        plan.booked_members()
            .filter(|member| self.lookup.predictors.covers(member))
            .cloned()
            .collect()
    }

    /// Records that the request is being sent: its prompts count as cached on the predicted
    /// members.
    pub fn predict_placement(&self, placement: &mut Placement) {
        for member in placement.predicted_members.drain(..) {
            let prediction = self.predict(&member, &placement.prompts);
            if member.rank == placement.chosen {
                placement.predictions.answering = prediction;
            } else {
                placement.predictions.prefilling = prediction;
            }
        }
    }
}
