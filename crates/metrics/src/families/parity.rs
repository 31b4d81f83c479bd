//! Metrics of the comparison between the tokens of warmroute and those of the engines.

use crate::*;

metrics! {
    /// Metrics of the comparison between the tokens of warmroute and those of the engines.
    ParityMetrics {
        /// Workers by model and result of the comparison of their tokens with those of warmroute:
        /// untested, agrees, differs (their requests are routed by load only), generation_prompt_differs (only
        /// the generation prompt differs), cannot_test
        "parity_workers" workers: Family<ModelOutcomeLabels, Gauge> = Family::default();
        /// 1 while the tokens of warmroute are not used for a model, because they differ from those
        /// of an engine and no engine confirms them
        "parity_tokens_disabled" tokens_disabled: Family<ModelLabel, Gauge> = Family::default();
        /// Comparisons of the tokens of a worker with those of warmroute, by model and outcome:
        /// agrees, differs, generation_prompt_differs, cannot_test
        "parity_checks" checks: Family<ModelOutcomeLabels, Counter> = Family::default();
        /// Token mismatches detected by canaries or KV events, by model
        "parity_mismatches" mismatches: Family<ModelLabel, Counter> = Family::default();
        /// Requests whose blocks were compared with the KV events of their engine, by model and
        /// outcome: confirmed, unconfirmed, unknown (no event has arrived, or the source does not
        /// report every block)
        "parity_event_checks" event_checks: Family<ModelOutcomeLabels, Counter> = Family::default();
    }
}
