//! Series that exist at zero before their first event, so that `rate()` and alerts see the first increment.

use super::labels::{
    CallLabels, CauseLabels, EngineSessionLabels, EventLabels, ListenerLabel,
    ListenerOutcomeLabels, ModelLabel, ModelOutcomeLabels, ModelRoleLabels, ModelTokensLabels,
    PhasesLabel, ReasonLabel, RequestLabels, SettingLabel,
};
use super::{Histograms, Metrics};
use crate::worker::{ModelName, Role};

/// Label values that the core defines and metrics cannot name themselves.
pub struct KnownLabels<'a> {
    /// The configured models.
    pub models: &'a [ModelName],
    /// Reasons of degradations.
    pub reasons: &'a [&'static str],
    /// Causes of missed tokens.
    pub causes: &'a [&'static str],
}

const PARITY_WORKERS: [&str; 4] = ["untested", "agrees", "differs", "cannot_test"];
const ENGINE_TOKENS: [&str; 10] = [
    "ok",
    "refused",
    "nobody",
    "busy",
    "unreachable",
    "timeout",
    "not_offered",
    "status",
    "unreadable",
    "too_large",
];
const AUDIT_ANSWERS: [&str; 8] = [
    "equal",
    "less",
    "more",
    "other_prompt",
    "unforeseen",
    "no_usage",
    "no_details",
    "undecided",
];
const AUDIT_TOKENS: [&str; 5] = ["prompt", "available", "captured", "by_chance", "delivered"];
const API_CALLS: [&str; 11] = [
    "Route",
    "AddRequest",
    "MarkPrefillCompleted",
    "AddOutputBlock",
    "Free",
    "OverlapScores",
    "PotentialLoads",
    "DumpEvents",
    "CopyRank",
    "WatchFleet",
    "Overlaps",
];
const LISTENERS: [&str; 6] = ["ext_proc", "ext_proc_unix", "api", "admin", "health", "xds"];

impl Metrics {
    /// Creates the series whose labels are known at the start.
    pub fn start_at_zero(&self, known: &KnownLabels<'_>) {
        for &reason in known.reasons {
            drop(self.degradations.get_or_create(&ReasonLabel { reason }));
        }
        for phases in ["aggregated", "remote_prefill"] {
            drop(self.phases.get_or_create(&PhasesLabel { phases }));
        }
        for kind in ["stored", "removed", "cleared"] {
            drop(self.kv_events.get_or_create(&EventLabels {
                kind,
                outcome: "ok",
            }));
        }
        for call in ["open", "close"] {
            for outcome in [
                "ok",
                "busy",
                "unreachable",
                "timeout",
                "not_offered",
                "status",
                "overflow",
            ] {
                drop(
                    self.engine_session_calls
                        .get_or_create(&EngineSessionLabels { call, outcome }),
                );
            }
        }
        for reason in [
            "busy",
            "timeout",
            "connection",
            "status",
            "too_long",
            "invalid",
        ] {
            drop(
                self.shared_cache_errors
                    .get_or_create(&ReasonLabel { reason }),
            );
        }
        for call in API_CALLS {
            drop(
                self.api_calls
                    .get_or_create(&CallLabels { call, code: "OK" }),
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
        drop(self.connections.get_or_create(&label));
        drop(self.connections_refused.get_or_create(&label));
        for outcome in ["done", "failed", "expired"] {
            drop(
                self.tls_handshakes
                    .get_or_create(&ListenerOutcomeLabels { listener, outcome }),
            );
        }
        for outcome in ["applied", "invalid"] {
            drop(
                self.tls_reloads
                    .get_or_create(&ListenerOutcomeLabels { listener, outcome }),
            );
        }
    }

    fn start_model_at_zero(&self, model: &ModelName, causes: &[&'static str]) {
        let label = ModelLabel::from(model);
        let counters = [&self.parity_mismatches, &self.shared_cache_beyond_blocks];
        counters
            .into_iter()
            .for_each(|family| drop(family.get_or_create(&label)));
        let histograms = [
            &self.shared_cache_hit_rate,
            &self.prefill_to_first_token_seconds,
            &self.audit_over_predicted_blocks,
            &self.audit_under_predicted_blocks,
        ];
        histograms
            .into_iter()
            .for_each(|family| drop(family.get_or_create(&label)));
        let outcomes: [(_, &[&'static str]); 5] = [
            (&self.audit_answers, &AUDIT_ANSWERS),
            (&self.engine_tokens, &ENGINE_TOKENS),
            (&self.tokenizer_comparisons, &["agrees", "differs"]),
            (&self.parity_tests, &["agrees", "differs", "cannot_test"]),
            (
                &self.parity_sightings,
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
                self.parity_workers
                    .get_or_create(&ModelOutcomeLabels::new(model, outcome)),
            );
        }
        drop(self.parity_mistrusted.get_or_create(&label));
        for kind in AUDIT_TOKENS {
            drop(self.audit_tokens.get_or_create(&ModelTokensLabels {
                model: label.model.clone(),
                kind,
            }));
        }
        for cause in causes {
            let labels = CauseLabels::new(&label.model, cause);
            drop(self.audit_missed_tokens.get_or_create(&labels));
            drop(self.audit_errors.get_or_create(&labels));
        }
        for mode in ["passthrough", "query", "rejected"] {
            drop(self.requests.get_or_create(&RequestLabels {
                model: label.model.clone(),
                mode,
                role: "none",
            }));
        }
        self.start_role_at_zero(model, Role::Aggregated);
    }

    /// Creates the series of requests whose prompts workers of a role compute, or that they answer. The roles of a model are
    /// known once its workers are.
    pub fn start_role_at_zero(&self, model: &ModelName, role: Role) {
        let labels = ModelRoleLabels::new(model, Some(role));
        let counters = [
            &self.best_cached_tokens,
            &self.predicted_cached_tokens,
            &self.delivered_cached_tokens,
            &self.non_max_overlap_choices,
        ];
        counters
            .into_iter()
            .for_each(|family| drop(family.get_or_create(&labels)));
        let prompts = [&self.hit_rate, &self.prompt_tokens];
        prompts
            .into_iter()
            .for_each(|family| drop(family.get_or_create(&labels)));
        if role == Role::Prefill {
            return;
        }
        for mode in ["exact", "partial", "approximate", "load_only"] {
            let labels = RequestLabels {
                model: model.as_str().to_owned(),
                mode,
                role: role.as_str(),
            };
            drop(self.requests.get_or_create(&labels));
        }
        let answers: [&Histograms<ModelRoleLabels>; 4] = [
            &self.output_tokens,
            &self.time_to_first_token_seconds,
            &self.inter_token_latency_seconds,
            &self.request_duration_seconds,
        ];
        answers
            .into_iter()
            .for_each(|family| drop(family.get_or_create(&labels)));
    }

    /// Creates the series of settings that engines may report otherwise than configured.
    pub fn start_setting_at_zero(&self, setting: &'static str) {
        drop(
            self.setting_mismatches
                .get_or_create(&SettingLabel { setting }),
        );
    }
}
