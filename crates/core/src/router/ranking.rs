//! Ranking of the candidates, for gateways that try fallback endpoints or want the cost of every
//! candidate. Computed only if one of the two is configured.

use std::collections::HashSet;

use super::phase_plan::PhaseChoice;
use super::pools::FleetAvailability;
use super::route::RankEndpoint;
use super::settings::RouterSettings;
use crate::fleet::FleetMember;
use crate::policy::costs;
use crate::worker::WorkerEndpoint;

/// Candidates of a phase, by cost.
#[derive(Debug, Default)]
pub(super) struct CandidateRanking {
    pub(super) fallbacks: Vec<RankEndpoint>,
    pub(super) scores: Vec<(WorkerEndpoint, f64)>,
}

impl CandidateRanking {
    /// Ranks the candidates, as far as configured.
    pub(super) fn new(
        settings: &RouterSettings,
        phase: &PhaseChoice<'_>,
        availability: &FleetAvailability,
    ) -> CandidateRanking {
        let max_fallbacks = settings.max_fallbacks;
        if max_fallbacks == 0 && !settings.reports_scores {
            return CandidateRanking::default();
        }
        let costs = costs(&phase.input, &phase.candidates, &phase.policy).into_iter();
        // NaN counts as infinity, as in the choice.
        let totals = costs.map(|cost| {
            if cost.total.is_nan() {
                f64::INFINITY
            } else {
                cost.total
            }
        });
        let mut ranked: Vec<(f64, &FleetMember)> =
            totals.zip(phase.members.iter().copied()).collect();
        ranked.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.rank.cmp(&b.1.rank)));
        let endpoint = |member: &FleetMember| member.worker.endpoint.canonical();
        let mut used = HashSet::from([endpoint(phase.member())]);
        let fallbacks = ranked
            .iter()
            .map(|(_, member)| *member)
            .filter(|member| availability.is_unrestricted(member))
            // The routing headers name the first choice at every front end.
            .filter(|member| member.worker.via.is_direct())
            .filter(|member| used.insert(endpoint(member)))
            .take(max_fallbacks)
            .map(RankEndpoint::of)
            .collect();
        let mut seen = HashSet::new();
        let scores = ranked
            .iter()
            .filter(|_| settings.reports_scores)
            .filter(|(_, member)| seen.insert(endpoint(member)));
        CandidateRanking {
            fallbacks,
            scores: scores
                .map(|(cost, member)| (member.worker.endpoint, *cost))
                .collect(),
        }
    }
}
