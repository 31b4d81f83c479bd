//! The sums over all judged answers, as they are shown.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::judge::{Cause, Verdict};
use crate::worker::{ModelName, Role};

/// Models that are told apart; answers of more are counted together under no name.
const MOST_MODELS: usize = 1024;

/// The sums by model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// By name.
    pub models: BTreeMap<String, ModelTotals>,
    /// Answers whose cause is still looked for.
    pub waiting: u64,
}

/// The sums of one model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelTotals {
    /// Answers that said what they found cached.
    pub answers: u64,
    /// Those of them for which nothing was foreseen.
    pub unforeseen: u64,
    /// Those that found as much as was foreseen.
    pub equal: u64,
    /// Those that found less.
    pub less: u64,
    /// Those that found more.
    pub more: u64,
    /// Those that found as much, of a prompt of another length.
    pub other_prompt: u64,
    /// Answers without usage.
    pub no_usage: u64,
    /// Answers whose usage does not say what was cached.
    pub no_details: u64,
    /// Answers after a prefill on another worker, whose cache report warmroute does not receive.
    pub undecided: u64,
    /// Answers with a cache report, by the role of the worker that computed the prompt.
    pub computed_by: BTreeMap<Role, u64>,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// What the best candidates had.
    pub available_tokens: u64,
    /// What the chosen ones had.
    pub captured_tokens: u64,
    /// What ones by chance would have had.
    pub by_chance_tokens: u64,
    /// What the engines found.
    pub delivered_tokens: u64,
    /// Tokens that were not found, by cause.
    pub missed_tokens: BTreeMap<Cause, u64>,
    /// Answers that found more or less than was foreseen, by cause.
    pub errors: BTreeMap<Cause, u64>,
    /// Answers by how many blocks more (or less) they found; far ones together at the ends.
    pub error_blocks: BTreeMap<i64, u64>,
}

/// Differences beyond this many blocks are counted as this many.
const FAR: i64 = 256;

impl Totals {
    /// The sums of one model.
    pub(super) fn of(&mut self, model: &ModelName) -> &mut ModelTotals {
        let known = self.models.len() < MOST_MODELS || self.models.contains_key(model.as_str());
        self.models
            .entry(if known {
                model.as_str().to_owned()
            } else {
                String::new()
            })
            .or_default()
    }
}

impl Verdict {
    /// The name in metrics of how it came.
    pub(super) fn outcome(&self) -> &'static str {
        let Some((blocks, _)) = self.error else {
            return if self.foreseen { "equal" } else { "unforeseen" };
        };
        match blocks.cmp(&0) {
            Ordering::Less => "less",
            Ordering::Equal => "other_prompt",
            Ordering::Greater => "more",
        }
    }
}

impl ModelTotals {
    pub(super) fn silent(&mut self, said_usage: bool) {
        let count = if said_usage {
            &mut self.no_details
        } else {
            &mut self.no_usage
        };
        *count += 1;
    }

    pub(super) fn add(&mut self, verdict: &Verdict) {
        self.answers += 1;
        if let Some(role) = verdict.role {
            *self.computed_by.entry(role).or_default() += 1;
        }
        self.prompt_tokens += verdict.prompt;
        self.available_tokens += verdict.available;
        self.captured_tokens += verdict.captured;
        self.by_chance_tokens += verdict.by_chance;
        self.delivered_tokens += verdict.delivered;
        for &(cause, tokens) in &verdict.missed {
            *self.missed_tokens.entry(cause).or_default() += tokens;
        }
        match verdict.outcome() {
            "unforeseen" => self.unforeseen += 1,
            "less" => self.less += 1,
            "more" => self.more += 1,
            "other_prompt" => self.other_prompt += 1,
            _ => self.equal += 1,
        }
        if !verdict.foreseen {
            return;
        }
        let blocks = verdict
            .error
            .map_or(0, |(blocks, _)| blocks.clamp(-FAR, FAR));
        *self.error_blocks.entry(blocks).or_default() += 1;
        if let Some((_, cause)) = verdict.error {
            *self.errors.entry(cause).or_default() += 1;
        }
    }

    /// Share of the prompts' tokens that the engines found cached.
    pub fn hit_rate(&self) -> f64 {
        share(self.delivered_tokens, self.prompt_tokens)
    }

    /// Tokens that were missed.
    pub fn missed(&self) -> u64 {
        self.prompt_tokens - self.delivered_tokens
    }
}

/// One number's share of another, 0 to 1.
pub fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}
