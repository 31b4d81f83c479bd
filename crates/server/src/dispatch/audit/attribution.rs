//! Attribution of cache misses: compares the report of an engine with the forecast, and assigns a
//! cause to every token that was not found cached. The attribution is a pure function. The causes
//! of one response add up to its missed tokens, so sums over many responses do as well.

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

use warmroute_core::index::EventCursor;
use warmroute_core::router::{Mode, Reason, Route};
use warmroute_core::worker::{BlockSize, ModelName, WorkerRank, WorkerRole};
use warmroute_tokens::openai::usage::TokenUsage;

/// Forecast for the worker rank that computes the prompt, made when the request was routed.
#[derive(Clone, Debug, PartialEq)]
pub struct HitForecast {
    /// Model of the request.
    pub model: ModelName,
    /// Worker rank that computes the prompt.
    pub rank: WorkerRank,
    /// Role of its worker; `None` if the worker has left the fleet.
    pub role: Option<WorkerRole>,
    /// Routing mode.
    pub mode: Mode,
    /// Reason for a mode other than exact.
    pub reason: Option<Reason>,
    /// Event position of the rank, if it publishes events.
    pub event_cursor: Option<EventCursor>,
    /// Number of prompt tokens according to warmroute.
    pub prompt_tokens: u64,
    /// Prompt tokens that an engine could find cached at best.
    pub reusable_tokens: u64,
    /// Prompt tokens cached at the best candidate.
    pub available_tokens: u64,
    /// Prompt tokens cached at the chosen rank.
    pub captured_tokens: u64,
    /// Mean of the prompt tokens cached over all candidates.
    pub chance_tokens: u64,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Whether the last matched block is not counted, because the engine computes it again.
    pub recomputes_last_block: bool,
}

impl HitForecast {
    /// Creates the forecast from a route. `role` and `event_cursor` describe the worker rank that
    /// computes the prompt.
    pub fn from_route(
        route: &Route,
        role: Option<WorkerRole>,
        event_cursor: Option<EventCursor>,
    ) -> Self {
        let computed_by = route.computed_by();
        Self {
            model: route.model.clone(),
            rank: computed_by.rank,
            role,
            mode: route.mode,
            reason: route.reason,
            event_cursor,
            prompt_tokens: route.prompt_tokens,
            reusable_tokens: route.reusable_tokens,
            available_tokens: computed_by.best_cached_tokens,
            captured_tokens: computed_by.cached_tokens,
            chance_tokens: computed_by.chance_cached_tokens,
            block_size: route.block_size,
            recomputes_last_block: false,
        }
    }
}

/// Usage that the engine reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportedUsage {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Prompt tokens that the engine found cached.
    pub cached_tokens: u64,
}

impl ReportedUsage {
    /// Returns the cache report in a usage; `None` if it has no number of cached tokens.
    pub fn from_usage(usage: TokenUsage) -> Option<Self> {
        Some(Self {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens?,
        })
    }
}

/// Observations between routing and response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissEvidence {
    /// Whether the events of the chosen rank explain the report by evictions or stores.
    pub events: EventEvidence,
    /// Whether another worker than the chosen one served the request.
    pub served_elsewhere: bool,
    /// Tokens that the engine may find beyond the predicted whole blocks, because its blocks are
    /// smaller.
    pub rounding_tokens: u64,
    /// Whether forecast and report differ only in the last matched block.
    pub is_last_block_difference: bool,
}

/// Evidence in the KV events, ordered so that the maximum over several prompts counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum EventEvidence {
    /// The events do not explain the report.
    #[default]
    Absent,
    /// Too many events have arrived since to decide.
    Unknown,
    /// The events explain the report.
    Present,
}

impl From<bool> for EventEvidence {
    fn from(is_present: bool) -> Self {
        if is_present {
            Self::Present
        } else {
            Self::Absent
        }
    }
}

/// Cause of a difference between forecast and report.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum MissCause {
    /// Engines reuse whole blocks only, and never the last token.
    BlockAlignment,
    /// No worker had cached the tokens.
    NotCached,
    /// Another worker had cached them, but was not chosen because of its load.
    LoadBalancing,
    /// The chosen worker evicted them between routing and prefill.
    Evicted,
    /// The chosen worker stored them between routing and prefill.
    StoredMeanwhile,
    /// The engine has smaller blocks, so it reused a part of a block of warmroute.
    BlockRounding,
    /// The engine began or stopped to recompute the last matched block, and this was not learned
    /// yet.
    DroppedBlock,
    /// The index was wrong.
    StaleIndex,
    /// Either evicted or a stale index: too many events have arrived since to decide.
    Unknown,
    /// The engine's tokens differ from warmroute's.
    TokenMismatch,
    /// Another worker than the chosen one served the request.
    ServedElsewhere,
    /// The cache was predicted without events, or only part of the prompt was known.
    Approximate,
    /// There was no forecast, because the request was routed by load.
    LoadOnly,
}

impl MissCause {
    /// All causes.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the metric label.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns a human-readable description.
    pub fn description(self) -> &'static str {
        match self {
            MissCause::BlockAlignment => "no whole block (or the last token)",
            MissCause::NotCached => "no worker had cached it",
            MissCause::LoadBalancing => "another worker was chosen for its load",
            MissCause::Evicted => "evicted before the prefill",
            MissCause::StoredMeanwhile => "stored before the prefill",
            MissCause::BlockRounding => "the engine's blocks are smaller than `block_size`",
            MissCause::DroppedBlock => "the engine recomputes the last matched block",
            MissCause::StaleIndex => "the index was out of date",
            MissCause::Unknown => "too many later events to decide",
            MissCause::TokenMismatch => "the engine's tokens differ",
            MissCause::ServedElsewhere => "another worker served it",
            MissCause::Approximate => "the cache was predicted without events",
            MissCause::LoadOnly => "routed by load alone",
        }
    }
}

/// Audited response.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditEntry<'f> {
    /// Forecast made when the request was routed.
    pub forecast: &'f HitForecast,
    /// Usage that the engine reported, within credible limits.
    pub usage: ReportedUsage,
    /// Tokens that were not found cached, by cause.
    pub missed_tokens: Vec<(MissCause, u64)>,
    /// Difference to the forecast in blocks (positive: more were found), and its cause.
    pub error: Option<(i64, MissCause)>,
    /// Whether there was a forecast.
    pub has_forecast: bool,
}

impl AuditEntry<'_> {
    /// Returns a number of tokens of the forecast, 0 without one.
    pub(super) fn predicted(&self, tokens: impl FnOnce(&HitForecast) -> u64) -> u64 {
        if self.has_forecast {
            tokens(self.forecast)
        } else {
            0
        }
    }
}

/// Returns whether attributing a response requires the KV events up to its end.
pub(super) fn needs_events(forecast: &HitForecast, usage: ReportedUsage) -> bool {
    forecast.mode == Mode::Exact
        && usage.prompt_tokens == forecast.prompt_tokens
        && usage.cached_tokens != forecast.captured_tokens
}

/// Maximum prompt length of a credible report. Reports are summed up, and an engine may report
/// anything.
pub(super) const MAX_PROMPT_TOKENS: u64 = 1 << 40;

/// Compares a report with the forecast and attributes the missed tokens.
pub fn attribute_miss(
    forecast: &HitForecast,
    usage: ReportedUsage,
    evidence: MissEvidence,
) -> AuditEntry<'_> {
    let prompt_tokens = usage.prompt_tokens.min(MAX_PROMPT_TOKENS);
    let usage = ReportedUsage {
        prompt_tokens,
        cached_tokens: usage.cached_tokens.min(prompt_tokens),
    };
    let delivered = usage.cached_tokens;
    let has_forecast = !is_load_only(forecast);
    let error = if has_forecast {
        prediction_error(forecast, usage, evidence)
    } else {
        None
    };
    let mut entry = AuditEntry {
        forecast,
        usage,
        missed_tokens: Vec::new(),
        error,
        has_forecast,
    };
    let block_size = forecast.block_size.tokens() as u64;
    let reusable = if has_forecast {
        forecast.reusable_tokens
    } else {
        prompt_tokens.saturating_sub(1) / block_size * block_size
    };
    let reusable = reusable.min(prompt_tokens).max(delivered);
    let mut rest = prompt_tokens - delivered;
    let mut attribute = |cause: MissCause, tokens: u64| {
        let tokens = tokens.min(rest);
        rest -= tokens;
        if tokens > 0 {
            entry.missed_tokens.push((cause, tokens));
        }
    };
    attribute(MissCause::BlockAlignment, prompt_tokens - reusable);
    if !has_forecast {
        let cause = if forecast.reason == Some(Reason::ParityMismatch) {
            MissCause::TokenMismatch
        } else {
            MissCause::LoadOnly
        };
        attribute(cause, u64::MAX);
        return entry;
    }
    // First predicted tokens that were not found, then tokens given up for load, then the rest.
    if let Some((_, cause)) = error {
        attribute(cause, forecast.captured_tokens.saturating_sub(delivered));
    }
    attribute(
        MissCause::LoadBalancing,
        forecast
            .available_tokens
            .saturating_sub(forecast.captured_tokens.max(delivered)),
    );
    attribute(MissCause::NotCached, u64::MAX);
    entry
}

fn is_load_only(forecast: &HitForecast) -> bool {
    matches!(forecast.mode, Mode::LoadOnly | Mode::Passthrough)
}

/// Returns the difference to the forecast in blocks, rounded away from zero, and its cause.
fn prediction_error(
    forecast: &HitForecast,
    usage: ReportedUsage,
    evidence: MissEvidence,
) -> Option<(i64, MissCause)> {
    let block_size = forecast.block_size.tokens() as i64;
    let difference = usage.cached_tokens as i64 - forecast.captured_tokens as i64;
    let blocks = difference.signum() * (difference.abs() + block_size - 1).div_euclid(block_size);
    let cause = match difference {
        _ if evidence.served_elsewhere => MissCause::ServedElsewhere,
        _ if forecast.mode == Mode::Exact && usage.prompt_tokens != forecast.prompt_tokens => {
            MissCause::TokenMismatch
        }
        0 => return None,
        _ if forecast.mode != Mode::Exact => MissCause::Approximate,
        1.. if difference as u64 <= evidence.rounding_tokens => MissCause::BlockRounding,
        _ if evidence.is_last_block_difference => MissCause::DroppedBlock,
        _ if evidence.events == EventEvidence::Unknown => MissCause::Unknown,
        _ if evidence.events == EventEvidence::Absent => MissCause::StaleIndex,
        ..0 => MissCause::Evicted,
        1.. => MissCause::StoredMeanwhile,
    };
    Some((blocks, cause))
}

#[cfg(test)]
mod tests;
