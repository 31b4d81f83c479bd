//! Totals over all audited responses, as the status page shows them.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use warmroute_core::worker::{ModelName, WorkerRole};

use super::attribution::{AuditEntry, MissCause};

/// Maximum number of models with separate totals. Further models share an entry without a name.
const MAX_MODELS: usize = 1024;

/// Totals by model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditTotals {
    /// Totals by model name.
    pub models: BTreeMap<String, ModelTotals>,
    /// Responses in the backlog.
    pub waiting: u64,
}

/// Totals of one model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelTotals {
    /// Responses that reported their cached tokens.
    pub responses: u64,
    /// Of these, responses without a forecast.
    pub not_predicted: u64,
    /// Responses that found as many tokens as predicted.
    pub equal: u64,
    /// Responses that found fewer tokens than predicted.
    pub fewer: u64,
    /// Responses that found more tokens than predicted.
    pub more: u64,
    /// Responses that found as many tokens as predicted, for a prompt of another length.
    pub other_prompt_length: u64,
    /// Responses without usage.
    pub no_usage: u64,
    /// Responses whose usage does not state cached tokens.
    pub no_cached_tokens: u64,
    /// Responses after a remote prefill whose cache report warmroute does not receive.
    pub undecided: u64,
    /// Responses with a cache report, by the role of the worker that computed the prompt.
    pub computed_by: BTreeMap<WorkerRole, u64>,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Tokens cached at the best candidates.
    pub available_tokens: u64,
    /// Tokens cached at the chosen workers.
    pub captured_tokens: u64,
    /// Mean of the tokens cached over all candidates.
    pub by_chance_tokens: u64,
    /// Tokens that the engines found cached.
    pub delivered_tokens: u64,
    /// Tokens that were not found cached, by cause.
    pub missed_tokens: BTreeMap<MissCause, u64>,
    /// Responses that found more or fewer tokens than predicted, by cause.
    pub errors: BTreeMap<MissCause, u64>,
    /// Responses by the difference in blocks, clamped to `MAX_ERROR_BLOCKS`.
    pub error_blocks: BTreeMap<i64, u64>,
}

/// Maximum difference that is counted separately, in blocks.
const MAX_ERROR_BLOCKS: i64 = 256;

impl AuditTotals {
    /// Returns the totals of one model.
    pub(super) fn model_mut(&mut self, model: &ModelName) -> &mut ModelTotals {
        let known = self.models.len() < MAX_MODELS || self.models.contains_key(model.as_str());
        self.models
            .entry(if known {
                model.as_str().to_owned()
            } else {
                String::new()
            })
            .or_default()
    }
}

impl AuditEntry<'_> {
    /// Returns the metric label of the outcome.
    pub(super) fn outcome_label(&self) -> &'static str {
        let Some((blocks, _)) = self.error else {
            return if self.has_forecast {
                "equal"
            } else {
                "not_predicted"
            };
        };
        match blocks.cmp(&0) {
            Ordering::Less => "fewer",
            Ordering::Equal => "other_prompt_length",
            Ordering::Greater => "more",
        }
    }
}

impl ModelTotals {
    pub(super) fn record_without_report(&mut self, has_usage: bool) {
        let count = if has_usage {
            &mut self.no_cached_tokens
        } else {
            &mut self.no_usage
        };
        *count += 1;
    }

    pub(super) fn add(&mut self, entry: &AuditEntry<'_>) {
        self.responses += 1;
        if let Some(role) = entry.forecast.role {
            *self.computed_by.entry(role).or_default() += 1;
        }
        self.prompt_tokens += entry.usage.prompt_tokens;
        self.available_tokens += entry.predicted(|forecast| forecast.available_tokens);
        self.captured_tokens += entry.predicted(|forecast| forecast.captured_tokens);
        self.by_chance_tokens += entry.predicted(|forecast| forecast.chance_tokens);
        self.delivered_tokens += entry.usage.cached_tokens;
        for &(cause, tokens) in &entry.missed_tokens {
            *self.missed_tokens.entry(cause).or_default() += tokens;
        }
        match entry.outcome_label() {
            "not_predicted" => self.not_predicted += 1,
            "fewer" => self.fewer += 1,
            "more" => self.more += 1,
            "other_prompt_length" => self.other_prompt_length += 1,
            _ => self.equal += 1,
        }
        if !entry.has_forecast {
            return;
        }
        let blocks = entry.error.map_or(0, |(blocks, _)| {
            blocks.clamp(-MAX_ERROR_BLOCKS, MAX_ERROR_BLOCKS)
        });
        *self.error_blocks.entry(blocks).or_default() += 1;
        if let Some((_, cause)) = entry.error {
            *self.errors.entry(cause).or_default() += 1;
        }
    }

    /// Returns the share of the prompt tokens that the engines found cached.
    pub fn hit_rate(&self) -> f64 {
        share(self.delivered_tokens, self.prompt_tokens)
    }

    /// Returns the number of prompt tokens that were not found cached.
    pub fn missed(&self) -> u64 {
        self.prompt_tokens - self.delivered_tokens
    }
}

/// Returns the ratio of two numbers, 0 if `whole` is 0.
pub fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}
