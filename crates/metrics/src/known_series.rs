//! Creates series at zero before their first event, so that `rate()` and alerts include the first
//! increment.

use super::labels::{
    ApiCallLabels, CauseLabels, EngineSessionLabels, EventLabels, ListenerLabel,
    ListenerOutcomeLabels, ModelLabel, ModelOutcomeLabels, ModelRoleLabels, ModelTokensLabels,
    PhasePlanLabel, ReasonLabel, RequestLabels, SettingLabel,
};
use super::{Histograms, Metrics, start_at_zero};
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
        let reason_label = |&reason: &&'static str| ReasonLabel { reason };
        start_at_zero(
            &self.requests.degradations,
            known.reasons.iter().map(reason_label),
        );
        start_at_zero(
            &self.index.shared_cache_lookup_errors,
            SHARED_CACHE_ERRORS.iter().map(reason_label),
        );
        let plans = ["aggregated", "remote_prefill"].map(|plan| PhasePlanLabel { plan });
        start_at_zero(&self.requests.phase_plans, plans);
        let outcome = "ok";
        let events = ["stored", "removed", "cleared"].map(|kind| EventLabels { kind, outcome });
        start_at_zero(&self.kv_events.events, events);
        for call in ["open", "close"] {
            let labels = ENGINE_SESSION_CALLS.map(|outcome| EngineSessionLabels { call, outcome });
            start_at_zero(&self.sessions.engine_calls, labels);
        }
        let calls = API_METHODS.map(|method| ApiCallLabels { method, code: "OK" });
        start_at_zero(&self.api.calls, calls);
        LISTENERS
            .into_iter()
            .for_each(|listener| self.start_listener_at_zero(listener));
        known
            .models
            .iter()
            .for_each(|model| self.start_model_at_zero(model, known.causes));
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
        let kinds = AUDIT_TOKENS.map(|kind| ModelTokensLabels {
            model: label.model.clone(),
            kind,
        });
        start_at_zero(&self.audit.tokens, kinds);
        let causes = causes
            .iter()
            .map(|cause| CauseLabels::new(model.as_str(), cause));
        start_at_zero(&self.audit.missed_tokens, causes.clone());
        start_at_zero(&self.audit.mispredictions, causes);
        let modes = ["passthrough", "query", "rejected"];
        start_at_zero(
            &self.requests.requests,
            request_labels(model, "none", modes),
        );
        self.start_role_at_zero(model, WorkerRole::Aggregated);
    }

    fn start_model_families_at_zero(&self, label: &ModelLabel) {
        let counters = [
            &self.parity.mismatches,
            &self.index.shared_cache_additional_blocks,
        ];
        for family in counters {
            drop(family.get_or_create(label));
        }
        let histograms = [
            &self.index.shared_cache_hit_ratio,
            &self.prefill.to_first_token_seconds,
            &self.latency.first_token_ratio,
            &self.audit.over_predicted_blocks,
            &self.audit.under_predicted_blocks,
        ];
        for family in histograms {
            drop(family.get_or_create(label));
        }
        drop(self.parity.tokens_disabled.get_or_create(label));
    }

    fn start_model_outcomes_at_zero(&self, model: &ModelName) {
        let outcomes: [(_, &[&'static str]); 5] = [
            (&self.audit.responses, &AUDIT_RESPONSES),
            (
                &self.tokens.remote_tokenizer_requests,
                &REMOTE_TOKENIZER_REQUESTS,
            ),
            (&self.tokens.tokenizer_comparisons, &["agrees", "differs"]),
            (
                &self.parity.checks,
                &[
                    "agrees",
                    "differs",
                    "generation_prompt_differs",
                    "cannot_test",
                ],
            ),
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
            drop(family.get_or_create(&labels));
        }
        let prompts = [
            &self.requests.prefix_hit_ratio,
            &self.requests.prompt_tokens,
        ];
        for family in prompts {
            drop(family.get_or_create(&labels));
        }
        if role == WorkerRole::Prefill {
            return;
        }
        let modes = ["exact", "partial", "approximate", "load_only"];
        start_at_zero(
            &self.requests.requests,
            request_labels(model, role.as_str(), modes),
        );
        let responses: [&Histograms<ModelRoleLabels>; 4] = [
            &self.requests.output_tokens,
            &self.requests.time_to_first_token_seconds,
            &self.requests.inter_token_latency_seconds,
            &self.requests.request_duration_seconds,
        ];
        for family in responses {
            drop(family.get_or_create(&labels));
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

fn request_labels<const N: usize>(
    model: &ModelName,
    role: &'static str,
    modes: [&'static str; N],
) -> [RequestLabels; N] {
    modes.map(|mode| RequestLabels {
        model: model.as_str().into(),
        mode,
        role,
    })
}
