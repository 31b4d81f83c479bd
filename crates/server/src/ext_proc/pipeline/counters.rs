//! Metrics of requests and routes.

use warmroute_core::router::{Reason, Route};
use warmroute_core::worker::{WorkerRank, WorkerRole};
use warmroute_metrics::{
    ModelLabel, ModelRoleLabels, PhasePlanLabel, RankLabels, ReasonLabel, RequestLabels,
};

use super::RequestPipeline;
use crate::dispatch::ActiveRequest;

impl RequestPipeline {
    /// Counts a request by its outcome.
    pub(super) fn count_request(&self, model: &ModelLabel, mode: &'static str, role: &'static str) {
        self.metrics
            .requests
            .requests
            .get_or_create(&RequestLabels {
                model: model.model.clone(),
                mode,
                role,
            })
            .inc();
    }

    /// Counts a request of a worker rank.
    fn count_worker_request(&self, rank: WorkerRank) {
        // The series of a removed rank no longer exist.
        if let Some(role) = self.router().role_of(rank) {
            let labels = RankLabels::new(rank, Some(role));
            self.metrics
                .requests
                .worker_requests
                .get_or_create(&labels)
                .inc();
        }
    }

    /// Counts a degradation by its reason.
    pub(super) fn count_degradation(&self, reason: Reason) {
        self.metrics
            .requests
            .degradations
            .get_or_create(&ReasonLabel {
                reason: reason.as_str(),
            })
            .inc();
    }

    /// Counts a route. `is_hashed` is true if the block hashes of its prompt are known.
    pub(super) fn count_route(&self, active: &ActiveRequest, label: &ModelLabel, is_hashed: bool) {
        self.metrics.observe_stage("index", active.times.index);
        self.metrics.observe_stage("choose", active.times.choose);
        let route = &active.placement.route;
        self.count_request(label, route.mode.as_str(), self.role_of(route.to.rank));
        self.count_worker_request(route.to.rank);
        if let Some(prefill) = route.prefill() {
            self.count_worker_request(prefill.to.rank);
        }
        if let Some(reason) = route.reason {
            self.count_degradation(reason);
        }
        let plan = PhasePlanLabel {
            plan: route.phases.as_str(),
        };
        self.metrics.requests.phase_plans.get_or_create(&plan).inc();
        if is_hashed {
            self.count_predicted_hits(route, label);
        }
    }

    fn count_predicted_hits(&self, route: &Route, label: &ModelLabel) {
        let computed_by = route.computed_by();
        let labels = &ModelRoleLabels {
            model: label.model.clone(),
            role: self.role_of(computed_by.rank),
        };
        self.metrics
            .requests
            .prompt_tokens
            .get_or_create(labels)
            .observe(route.prompt_tokens as f64);
        self.metrics
            .requests
            .prefix_hit_ratio
            .get_or_create(labels)
            .observe(route.hit_rate());
        if route.shared_beyond_device > 0 {
            self.metrics
                .index
                .shared_cache_additional_blocks
                .get_or_create(label)
                .inc_by(route.shared_beyond_device);
        }
        self.metrics
            .requests
            .available_cached_tokens
            .get_or_create(labels)
            .inc_by(computed_by.best_cached_tokens);
        self.metrics
            .requests
            .predicted_cached_tokens
            .get_or_create(labels)
            .inc_by(computed_by.cached_tokens);
        if computed_by.cached_tokens < computed_by.best_cached_tokens {
            self.metrics
                .requests
                .non_max_overlap_choices
                .get_or_create(labels)
                .inc();
        }
    }

    fn role_of(&self, rank: WorkerRank) -> &'static str {
        self.router()
            .role_of(rank)
            .map_or("unknown", WorkerRole::as_str)
    }
}
