//! Creates series at zero before their first event, so that `rate()` and alerts include the first
//! increment.

use super::labels::{
    ApiCallLabels, CauseLabels, EngineSessionLabels, EventLabels, ListenerLabel,
    ListenerOutcomeLabels, ModelLabel, ModelOutcomeLabels, ModelRoleLabels, ModelTokensLabels,
    PhasePlanLabel, ReasonLabel, RequestLabels, SettingLabel,
};
use super::{Metrics, start_at_zero};
use warmroute_core::worker::{ModelName, WorkerRole};

/// Label values that are defined outside this crate.
pub struct KnownLabels<'a> {
    /// The configured models.
    pub models: &'a [ModelName],
    /// Reasons for which a request is not routed in exact mode.
    pub reasons: &'a [&'static str],
    /// Causes of prompt tokens that the engine had not cached.
    pub causes: &'a [&'static str],
}

const ENGINE_SESSION_CALLS: [&str; 7] = [
    "ok",
    "busy",
    "unreachable",
    "timeout",
    "not_offered",
    "status",
    "overflow",
];
const SHARED_CACHE_ERRORS: [&str; 6] = [
    "busy",
    "timeout",
    "connection",
    "status",
    "too_long",
    "invalid",
];
/// Results of a worker. The first is the state before any comparison.
const PARITY_WORKERS: [&str; 5] = [
    "untested",
    "agrees",
    "differs",
    "generation_prompt_differs",
    "cannot_test",
];
const REMOTE_TOKENIZER_REQUESTS: [&str; 10] = [
    "ok",
    "refused",
    "no_engine",
    "busy",
    "unreachable",
    "timeout",
    "not_offered",
    "status",
    "unreadable",
    "too_large",
];
const AUDIT_RESPONSES: [&str; 8] = [
    "equal",
    "fewer",
    "more",
    "other_prompt_length",
    "not_predicted",
    "no_usage",
    "no_cached_tokens",
    "undecided",
];
const AUDIT_TOKENS: [&str; 5] = ["prompt", "available", "captured", "by_chance", "delivered"];
const API_METHODS: [&str; 12] = [
    "Route",
    "AddRequest",
    "MarkPrefillCompleted",
    "AddOutputBlock",
    "Free",
    "OverlapScores",
    "PotentialLoads",
    "DumpEvents",
    "CopyRank",
    "CopyLatency",
    "WatchFleet",
    "Overlaps",
];
const LISTENERS: [&str; 6] = ["ext_proc", "ext_proc_unix", "api", "admin", "health", "xds"];

impl Metrics {
    /// Creates the series whose labels are known when the process starts.
    pub fn init_known_series(&self, known: &KnownLabels<'_>) {
        let reasons = known.reasons.iter().copied();
        let degradations = reasons.map(|reason| ReasonLabel { reason });
        start_at_zero(&self.requests.degradations, degradations);
        let plans = ["aggregated", "remote_prefill"];
        let plans = plans.map(|plan| PhasePlanLabel { plan });
        start_at_zero(&self.requests.phase_plans, plans);
        let events = ["stored", "removed", "cleared"].map(|kind| EventLabels {
            kind,
            outcome: "ok",
        });
        start_at_zero(&self.kv_events.events, events);
        for call in ["open", "close"] {
            let calls = ENGINE_SESSION_CALLS.map(|outcome| EngineSessionLabels { call, outcome });
            start_at_zero(&self.sessions.engine_calls, calls);
        }
        let errors = SHARED_CACHE_ERRORS.map(|reason| ReasonLabel { reason });
        start_at_zero(&self.index.shared_cache_lookup_errors, errors);
        let calls = API_METHODS.map(|method| ApiCallLabels { method, code: "OK" });
        start_at_zero(&self.api.calls, calls);
        for listener in LISTENERS {
            self.start_listener_at_zero(listener);
        }
        for model in known.models {
            self.start_model_at_zero(model, known.causes);
        }
    }

    fn start_listener_at_zero(&self, listener: &'static str) {
        let label = ListenerLabel { listener };
        start_at_zero(&self.listeners.connections, [label.clone()]);
        start_at_zero(&self.listeners.connections_refused, [label]);
        let with_outcome = |outcome| ListenerOutcomeLabels { listener, outcome };
        let handshakes = ["done", "failed", "expired"].map(with_outcome);
        start_at_zero(&self.listeners.tls_handshakes, handshakes);
        let reloads = ["applied", "invalid"].map(with_outcome);
        start_at_zero(&self.listeners.tls_reloads, reloads);
    }

    fn start_model_at_zero(&self, model: &ModelName, causes: &[&'static str]) {
        let label = ModelLabel::from(model);
        self.start_model_families_at_zero(&label);
        self.start_model_outcomes_at_zero(model);
        let tokens = AUDIT_TOKENS.map(|kind| ModelTokensLabels {
            model: label.model.clone(),
            kind,
        });
        start_at_zero(&self.audit.tokens, tokens);
        for family in [&self.audit.missed_tokens, &self.audit.mispredictions] {
            let causes = causes.iter().copied();
            start_at_zero(
                family,
                causes.map(|cause| CauseLabels::new(model.as_str(), cause)),
            );
        }
        self.start_requests_at_zero(model, &["passthrough", "query", "rejected"], "none");
        self.start_role_at_zero(model, WorkerRole::Aggregated);
    }

    fn start_requests_at_zero(
        &self,
        model: &ModelName,
        modes: &[&'static str],
        role: &'static str,
    ) {
        let requests = modes.iter().map(|&mode| RequestLabels {
            model: model.as_str().into(),
            mode,
            role,
        });
        start_at_zero(&self.requests.requests, requests);
    }

    fn start_model_families_at_zero(&self, label: &ModelLabel) {
        let counters = [
            &self.parity.mismatches,
            &self.index.shared_cache_additional_blocks,
        ];
        for family in counters {
            start_at_zero(family, [label.clone()]);
        }
        let histograms = [
            &self.index.shared_cache_hit_ratio,
            &self.prefill.to_first_token_seconds,
            &self.latency.first_token_ratio,
            &self.audit.over_predicted_blocks,
            &self.audit.under_predicted_blocks,
        ];
        for family in histograms {
            start_at_zero(family, [label.clone()]);
        }
        start_at_zero(&self.parity.tokens_disabled, [label.clone()]);
    }

    fn start_model_outcomes_at_zero(&self, model: &ModelName) {
        let outcomes: [(_, &[&'static str]); 5] = [
            (&self.audit.responses, &AUDIT_RESPONSES),
            (
                &self.tokens.remote_tokenizer_requests,
                &REMOTE_TOKENIZER_REQUESTS,
            ),
            (&self.tokens.tokenizer_comparisons, &["agrees", "differs"]),
            (&self.parity.checks, &PARITY_WORKERS[1..]),
            (
                &self.parity.event_checks,
                &["confirmed", "unconfirmed", "unknown"],
            ),
        ];
        let with_outcome = |outcome: &&'static str| ModelOutcomeLabels::new(model, outcome);
        for (family, values) in outcomes {
            start_at_zero(family, values.iter().map(with_outcome));
        }
        start_at_zero(
            &self.parity.workers,
            PARITY_WORKERS.iter().map(with_outcome),
        );
    }

    /// Creates the series of one role of a model. Called when the roles of the model's workers are
    /// known.
    pub fn start_role_at_zero(&self, model: &ModelName, role: WorkerRole) {
        let labels = ModelRoleLabels::new(model, Some(role));
        let counters = [
            &self.requests.available_cached_tokens,
            &self.requests.predicted_cached_tokens,
            &self.requests.reported_cached_tokens,
            &self.requests.non_max_overlap_choices,
        ];
        for family in counters {
            start_at_zero(family, [labels.clone()]);
        }
        for family in [
            &self.requests.prefix_hit_ratio,
            &self.requests.prompt_tokens,
        ] {
            start_at_zero(family, [labels.clone()]);
        }
        if role == WorkerRole::Prefill {
            return;
        }
        let modes = ["exact", "partial", "approximate", "load_only"];
        self.start_requests_at_zero(model, &modes, role.as_str());
        let responses = [
            &self.requests.output_tokens,
            &self.requests.time_to_first_token_seconds,
            &self.requests.inter_token_latency_seconds,
            &self.requests.request_duration_seconds,
        ];
        for family in responses {
            start_at_zero(family, [labels.clone()]);
        }
    }

    /// Creates the series of a setting for engines that report another value than the configured
    /// one.
    pub fn start_setting_at_zero(&self, setting: &'static str) {
        start_at_zero(
            &self.workers.engine_setting_mismatches,
            [SettingLabel { setting }],
        );
    }
}
