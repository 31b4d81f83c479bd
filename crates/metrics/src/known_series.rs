//! Creates series at zero before their first event, so that `rate()` and alerts include the first
//! increment.

use super::labels::{
    ApiCallLabels, CauseLabels, EngineSessionLabels, EventLabels, ListenerLabel,
    ListenerOutcomeLabels, ModelLabel, ModelOutcomeLabels, ModelRoleLabels, ModelTokensLabels,
    PhasePlanLabel, ReasonLabel, RequestLabels, SettingLabel,
};
use super::{Histograms, Metrics};
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
        for &reason in known.reasons {
            drop(
                self.requests
                    .degradations
                    .get_or_create(&ReasonLabel { reason }),
            );
        }
        for plan in ["aggregated", "remote_prefill"] {
            drop(
                self.requests
                    .phase_plans
                    .get_or_create(&PhasePlanLabel { plan }),
            );
        }
        for kind in ["stored", "removed", "cleared"] {
            drop(self.kv_events.events.get_or_create(&EventLabels {
                kind,
                outcome: "ok",
            }));
        }
        for call in ["open", "close"] {
            for outcome in ENGINE_SESSION_CALLS {
                drop(
                    self.sessions
                        .engine_calls
                        .get_or_create(&EngineSessionLabels { call, outcome }),
                );
            }
        }
        for reason in SHARED_CACHE_ERRORS {
            drop(
                self.index
                    .shared_cache_lookup_errors
                    .get_or_create(&ReasonLabel { reason }),
            );
        }
        for method in API_METHODS {
            drop(
                self.api
                    .calls
                    .get_or_create(&ApiCallLabels { method, code: "OK" }),
            );
        }
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
        drop(self.listeners.connections.get_or_create(&label));
        drop(self.listeners.connections_refused.get_or_create(&label));
        for outcome in ["done", "failed", "expired"] {
            drop(
                self.listeners
                    .tls_handshakes
                    .get_or_create(&ListenerOutcomeLabels { listener, outcome }),
            );
        }
        for outcome in ["applied", "invalid"] {
            drop(
                self.listeners
                    .tls_reloads
                    .get_or_create(&ListenerOutcomeLabels { listener, outcome }),
            );
        }
    }

    fn start_model_at_zero(&self, model: &ModelName, causes: &[&'static str]) {
        let label = ModelLabel::from(model);
        self.start_model_families_at_zero(&label);
        self.start_model_outcomes_at_zero(model);
        for kind in AUDIT_TOKENS {
            drop(self.audit.tokens.get_or_create(&ModelTokensLabels {
                model: label.model.clone(),
                kind,
            }));
        }
        for cause in causes {
            let labels = CauseLabels::new(model.as_str(), cause);
            drop(self.audit.missed_tokens.get_or_create(&labels));
            drop(self.audit.mispredictions.get_or_create(&labels));
        }
        for mode in ["passthrough", "query", "rejected"] {
            drop(self.requests.requests.get_or_create(&RequestLabels {
                model: label.model.clone(),
                mode,
                role: "none",
            }));
        }
        self.start_role_at_zero(model, WorkerRole::Aggregated);
    }

    fn start_model_families_at_zero(&self, label: &ModelLabel) {
        let counters = [
            &self.parity.mismatches,
            &self.index.shared_cache_additional_blocks,
        ];
        counters
            .into_iter()
            .for_each(|family| drop(family.get_or_create(label)));
        let histograms = [
            &self.index.shared_cache_hit_ratio,
            &self.prefill.to_first_token_seconds,
            &self.latency.first_token_ratio,
            &self.audit.over_predicted_blocks,
            &self.audit.under_predicted_blocks,
        ];
        histograms
            .into_iter()
            .for_each(|family| drop(family.get_or_create(label)));
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
        for (family, values) in outcomes {
            values.iter().for_each(|value| {
                drop(family.get_or_create(&ModelOutcomeLabels::new(model, value)))
            });
        }
        for outcome in PARITY_WORKERS {
            drop(
                self.parity
                    .workers
                    .get_or_create(&ModelOutcomeLabels::new(model, outcome)),
            );
        }
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
        counters
            .into_iter()
            .for_each(|family| drop(family.get_or_create(&labels)));
        let prompts = [
            &self.requests.prefix_hit_ratio,
            &self.requests.prompt_tokens,
        ];
        prompts
            .into_iter()
            .for_each(|family| drop(family.get_or_create(&labels)));
        if role == WorkerRole::Prefill {
            return;
        }
        for mode in ["exact", "partial", "approximate", "load_only"] {
            let labels = RequestLabels {
                model: model.as_str().into(),
                mode,
                role: role.as_str(),
            };
            drop(self.requests.requests.get_or_create(&labels));
        }
        let responses: [&Histograms<ModelRoleLabels>; 4] = [
            &self.requests.output_tokens,
            &self.requests.time_to_first_token_seconds,
            &self.requests.inter_token_latency_seconds,
            &self.requests.request_duration_seconds,
        ];
        responses
            .into_iter()
            .for_each(|family| drop(family.get_or_create(&labels)));
    }

    /// Creates the series of a setting for engines that report another value than the configured
    /// one.
    pub fn start_setting_at_zero(&self, setting: &'static str) {
        drop(
            self.workers
                .engine_setting_mismatches
                .get_or_create(&SettingLabel { setting }),
        );
    }
}
