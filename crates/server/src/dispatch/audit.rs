//! Audit of the cache predictions. Every response that reports its cached tokens is compared with
//! the forecast made when the request was routed. A match is counted at once. A difference is
//! attributed to a cause a moment later, after the engine's events of that time have arrived:
//! either they explain it, or the index was wrong.
//!
//! Decision 0027.

mod attribution;
pub mod table;
mod totals;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::info;

pub use attribution::{
    AuditEntry, EventEvidence, HitForecast, MissCause, MissEvidence, ReportedUsage, attribute_miss,
};
pub use totals::{AuditTotals, ModelTotals, share};

use warmroute_core::block::BlockHashes;
use warmroute_core::index::{Overlaps, PrefixIndex};
use warmroute_core::router::{LastBlockEvidence, LastBlockReuse, Mode, Route, Router};
use warmroute_core::worker::{BlockSize, ModelName, RankSlot};
use warmroute_metrics::{
    CauseLabels, Metrics, ModelLabel, ModelOutcomeLabels, ModelRoleLabels, ModelTokensLabels,
};
use warmroute_tokens::openai::usage::TokenUsage;

/// Time that an engine's events may take to arrive.
const EVENT_GRACE: Duration = Duration::from_secs(1);

/// Maximum number of responses that wait for their events. Beyond it, causes are attributed at
/// once.
const MAX_PENDING_RESPONSES: usize = 4096;
/// Maximum number of prompt blocks that the waiting responses may hold.
const MAX_PENDING_BLOCKS: usize = 1 << 20;

/// Completed response.
#[derive(Clone, Debug)]
pub struct AuditedResponse {
    /// Forecast made when the request was routed.
    pub forecast: HitForecast,
    /// Usage that the engine reported.
    pub usage: ReportedUsage,
    /// Prompts of the request, as far as they are known.
    pub prompts: Vec<BlockHashes>,
    /// Whether another worker than the chosen one served the response.
    pub served_elsewhere: bool,
    /// Tokens per block of the chosen engine, if its events report them.
    engine_block_size: Option<BlockSize>,
    /// Leading prompt blocks that the chosen rank held when the response ended. Read only if the
    /// engine found more than predicted.
    held_at_end: u64,
}

/// Audit of all responses since the start.
pub struct CacheAudit {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    totals: Mutex<AuditTotals>,
    backlog: Mutex<AuditBacklog>,
}

/// Responses that wait for their events.
#[derive(Default)]
struct AuditBacklog {
    responses: VecDeque<(Instant, AuditedResponse)>,
    /// Blocks of their prompts.
    blocks: usize,
}

impl AuditBacklog {
    /// Queues a response, or returns it if the backlog is full.
    fn push(&mut self, due: Instant, response: AuditedResponse) -> Option<AuditedResponse> {
        let blocks = response.block_count();
        if self.responses.len() >= MAX_PENDING_RESPONSES
            || self.blocks + blocks > MAX_PENDING_BLOCKS
        {
            return Some(response);
        }
        self.blocks += blocks;
        self.responses.push_back((due, response));
        None
    }

    fn pop_due(&mut self, now: Instant) -> Option<AuditedResponse> {
        self.responses.front().filter(|(due, _)| *due <= now)?;
        let (_, response) = self.responses.pop_front()?;
        self.blocks -= response.block_count();
        Some(response)
    }
}

impl AuditedResponse {
    /// Creates the response of the chosen worker.
    pub fn new(forecast: HitForecast, usage: ReportedUsage, prompts: Vec<BlockHashes>) -> Self {
        Self {
            forecast,
            usage,
            prompts,
            served_elsewhere: false,
            engine_block_size: None,
            held_at_end: 0,
        }
    }

    /// Sets whether another worker than the chosen one served the response.
    #[must_use]
    pub fn with_served_elsewhere(self, served_elsewhere: bool) -> Self {
        Self {
            served_elsewhere,
            ..self
        }
    }

    fn block_count(&self) -> usize {
        self.prompts.iter().map(BlockHashes::len).sum()
    }

    /// Confirms to the index the cached blocks that the engine reported. Only for a single prompt,
    /// because a report covers all prompts together.
    fn confirm_index(&self, index: &PrefixIndex, slot: RankSlot) {
        let forecast = &self.forecast;
        let is_same_prompt = match forecast.mode {
            Mode::Exact => self.usage.prompt_tokens == forecast.prompt_tokens,
            mode => mode == Mode::Partial,
        };
        if !is_same_prompt || self.served_elsewhere {
            return;
        }
        if let ([prompt], Some(cursor)) = (&self.prompts[..], forecast.event_cursor) {
            let blocks = self.usage.cached_tokens / forecast.block_size.tokens() as u64;
            index.confirm_cached(prompt, blocks as usize, slot, cursor);
        }
    }

    /// Returns the number of leading prompt blocks that a slot holds now.
    fn held_blocks(&self, index: &PrefixIndex, slot: RankSlot) -> u64 {
        let mut overlaps = Overlaps::new();
        let mut held = |hashes| {
            index.query_overlaps(hashes, &mut overlaps);
            u64::from(overlaps.get(slot).total())
        };
        self.prompts.iter().map(&mut held).sum()
    }

    /// Returns the number of tokens that an engine with smaller blocks may find beyond the
    /// predicted whole blocks, over all prompts.
    fn rounding_tokens(&self) -> u64 {
        let ours = self.forecast.block_size.tokens();
        let rest = self
            .engine_block_size
            .map_or(0, |engine| ours.saturating_sub(engine.tokens()));
        rest as u64 * self.prompts.len() as u64
    }

    /// Returns the part of the matched prefix that the engine reused, if the report proves it. A
    /// report without cached tokens proves nothing: the request may read no cache.
    fn match_evidence(&self, events: EventEvidence) -> Option<LastBlockEvidence> {
        let forecast = &self.forecast;
        let ReportedUsage {
            prompt_tokens,
            cached_tokens,
        } = self.usage;
        let is_comparable = forecast.mode == Mode::Exact
            && prompt_tokens == forecast.prompt_tokens
            && forecast.captured_tokens > 0
            && cached_tokens > 0
            && self.prompts.len() == 1
            && !self.served_elsewhere
            && self.rounding_tokens() == 0;
        let block = self
            .engine_block_size
            .unwrap_or(forecast.block_size)
            .tokens() as u64;
        let matched = forecast.captured_tokens + u64::from(forecast.recomputes_last_block) * block;
        match cached_tokens {
            _ if !is_comparable => None,
            _ if cached_tokens == matched => Some(LastBlockEvidence::Reused),
            _ if cached_tokens.saturating_add(block) == matched
                && events != EventEvidence::Present =>
            {
                Some(LastBlockEvidence::Recomputed)
            }
            _ => None,
        }
    }

    /// Returns whether the events of the chosen rank explain the report. Blocks that were missing
    /// have been computed and stored again, so they are held now in any case. The function
    /// therefore checks whether they were evicted in between.
    fn event_evidence(&self, index: &PrefixIndex, slot: RankSlot) -> EventEvidence {
        let forecast = &self.forecast;
        let Some(cursor) = forecast.event_cursor else {
            return EventEvidence::Absent;
        };
        let block_size = forecast.block_size.tokens() as u64;
        let found = self.usage.cached_tokens / block_size;
        let captured = forecast.captured_tokens / block_size;
        let held = self.held_blocks(index, slot);
        if found > captured {
            // Blocks that another request stored may have been evicted since.
            return EventEvidence::from(held.max(self.held_at_end) >= found);
        }
        if held < captured {
            return EventEvidence::Present;
        }
        let evidence = self.prompts.iter().map(|hashes| {
            let blocks = if self.prompts.len() == 1 {
                captured as usize
            } else {
                hashes.len()
            };
            index
                .was_reinserted_since(hashes, blocks, slot, cursor)
                .map_or(EventEvidence::Unknown, EventEvidence::from)
        });
        evidence.max().unwrap_or_default()
    }
}

impl CacheAudit {
    /// Creates an audit without responses.
    pub fn new(router: Arc<Router>, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            router,
            metrics,
            totals: Mutex::default(),
            backlog: Mutex::default(),
        })
    }

    /// Returns the forecast for the worker rank that computes the prompt, with the event position
    /// of that rank.
    pub fn forecast(&self, route: &Route) -> HitForecast {
        let rank = route.computed_by().rank;
        let slot = self.router.fleet().slot(rank);
        let cursor = slot.and_then(|slot| self.router.index().event_cursor(slot));
        HitForecast {
            recomputes_last_block: self.router.recomputes_last_block(rank.worker),
            ..HitForecast::from_route(route, self.router.role_of(rank), cursor)
        }
    }

    /// Counts the cached tokens that the worker reported.
    pub fn count_delivered_tokens(&self, forecast: &HitForecast, usage: ReportedUsage) {
        let labels = ModelRoleLabels::new(&forecast.model, forecast.role);
        // The report is clamped, because a counter cannot be decreased after a wrong value.
        let max = usage.prompt_tokens.min(attribution::MAX_PROMPT_TOKENS);
        self.metrics
            .requests
            .reported_cached_tokens
            .get_or_create(&labels)
            .inc_by(usage.cached_tokens.min(max));
    }

    /// Audits a successful response with its usage. `is_served_elsewhere` is true if another worker
    /// than the chosen one served it.
    pub fn record_usage(
        &self,
        forecast: HitForecast,
        usage: Option<TokenUsage>,
        prompts: Vec<BlockHashes>,
        is_served_elsewhere: bool,
    ) {
        let reported = usage.and_then(ReportedUsage::from_usage);
        match reported.filter(|reported| reported.prompt_tokens > 0) {
            Some(reported) => {
                let response = AuditedResponse::new(forecast, reported, prompts)
                    .with_served_elsewhere(is_served_elsewhere);
                self.record_response(response, Instant::now());
            }
            None => self.record_without_report(&forecast.model, usage.is_some()),
        }
    }

    /// Audits a response that reported its cached tokens.
    pub fn record_response(&self, mut response: AuditedResponse, now: Instant) {
        let rank = response.forecast.rank;
        response.engine_block_size = self.router.source_status(rank).engine_block_size;
        if let Some(slot) = self.router.fleet().slot(rank) {
            response.confirm_index(self.router.index(), slot);
            if response.usage.cached_tokens > response.forecast.captured_tokens {
                response.held_at_end = response.held_blocks(self.router.index(), slot);
            }
        }
        let needs_events = attribution::needs_events(&response.forecast, response.usage)
            && !response.served_elsewhere;
        let ready = if needs_events {
            self.backlog.lock().push(now + EVENT_GRACE, response)
        } else {
            Some(response)
        };
        if let Some(response) = ready {
            self.resolve(&response);
        }
    }

    /// Counts a successful response that did not report its cached tokens. `has_usage` is true if
    /// it reported usage at all.
    pub fn record_without_report(&self, model: &ModelName, has_usage: bool) {
        let outcome = if has_usage {
            "no_cached_tokens"
        } else {
            "no_usage"
        };
        self.totals
            .lock()
            .model_mut(model)
            .record_without_report(has_usage);
        self.metrics
            .audit
            .responses
            .get_or_create(&ModelOutcomeLabels::new(model, outcome))
            .inc();
    }

    /// Counts a successful response whose prompt another worker computed, if warmroute did not
    /// receive the cache report of that worker.
    pub fn count_undecided(&self, model: &ModelName) {
        self.totals.lock().model_mut(model).undecided += 1;
        self.metrics
            .audit
            .responses
            .get_or_create(&ModelOutcomeLabels::new(model, "undecided"))
            .inc();
    }

    /// Attributes the causes of responses whose events should have arrived.
    pub fn resolve_due(&self, now: Instant) {
        let due = || self.backlog.lock().pop_due(now);
        while let Some(response) = due() {
            self.resolve(&response);
        }
    }

    /// Returns the totals by model, and the number of responses in the backlog.
    pub fn totals(&self) -> AuditTotals {
        let waiting = self.backlog.lock().responses.len();
        let mut totals = self.totals.lock().clone();
        totals.waiting = waiting as u64;
        totals
    }

    fn resolve(&self, response: &AuditedResponse) {
        let needs_events = attribution::needs_events(&response.forecast, response.usage)
            && !response.served_elsewhere;
        let slot = self
            .router
            .fleet()
            .slot(response.forecast.rank)
            .filter(|_| needs_events);
        let events = if self.router.has_remote_index() {
            // Only the index server has the events, and it is not queried again for a cause.
            EventEvidence::Unknown
        } else {
            slot.map_or(EventEvidence::Absent, |slot| {
                response.event_evidence(self.router.index(), slot)
            })
        };
        let evidence = MissEvidence {
            events,
            served_elsewhere: response.served_elsewhere,
            rounding_tokens: response.rounding_tokens(),
            is_last_block_difference: self.learn_last_block(response, events),
        };
        let entry = attribute_miss(&response.forecast, response.usage, evidence);
        self.update_metrics(&entry);
        let model = &response.forecast.model;
        self.totals.lock().model_mut(model).add(&entry);
    }

    /// Learns whether the engine recomputes the last matched block. Returns whether this alone
    /// explains the difference to the forecast.
    fn learn_last_block(&self, response: &AuditedResponse, events: EventEvidence) -> bool {
        let Some(evidence) = response.match_evidence(events) else {
            return false;
        };
        let HitForecast { rank, model, .. } = &response.forecast;
        let worker = rank.worker;
        let (before, after) = self.router.record_last_block(worker, evidence);
        match (before, after) {
            (LastBlockReuse::Reused { .. }, LastBlockReuse::Recomputed) => info!(
                %model,
                %worker,
                "engine recomputes the last matched block of each prompt; predictions exclude it"
            ),
            (LastBlockReuse::Recomputed, LastBlockReuse::Reused { .. }) => {
                info!(%model, %worker, "engine reuses the last matched block of each prompt; predictions include it");
            }
            _ => {}
        }
        match evidence {
            LastBlockEvidence::Reused => response.forecast.recomputes_last_block,
            LastBlockEvidence::Recomputed => {
                !response.forecast.recomputes_last_block && after.is_likely_recomputed()
            }
        }
    }

    fn update_metrics(&self, entry: &AuditEntry<'_>) {
        let audit = &self.metrics.audit;
        let model = &entry.forecast.model;
        let tokens = [
            ("prompt", entry.usage.prompt_tokens),
            (
                "available",
                entry.predicted(|forecast| forecast.available_tokens),
            ),
            (
                "captured",
                entry.predicted(|forecast| forecast.captured_tokens),
            ),
            (
                "by_chance",
                entry.predicted(|forecast| forecast.chance_tokens),
            ),
            ("delivered", entry.usage.cached_tokens),
        ];
        for (kind, count) in tokens {
            audit
                .tokens
                .get_or_create(&ModelTokensLabels {
                    model: model.as_str().into(),
                    kind,
                })
                .inc_by(count);
        }
        for &(cause, count) in &entry.missed_tokens {
            audit
                .missed_tokens
                .get_or_create(&CauseLabels::new(model.as_str(), cause.as_str()))
                .inc_by(count);
        }
        let outcome = entry.outcome_label();
        audit
            .responses
            .get_or_create(&ModelOutcomeLabels::new(model, outcome))
            .inc();
        if !entry.has_forecast {
            return;
        }
        if let Some((blocks, cause)) = entry.error {
            let by_sign = match blocks {
                ..0 => Some(&audit.over_predicted_blocks),
                0 => None,
                1.. => Some(&audit.under_predicted_blocks),
            };
            if let Some(family) = by_sign {
                family
                    .get_or_create(&ModelLabel::from(model))
                    .observe(blocks.unsigned_abs() as f64);
            }
            audit
                .mispredictions
                .get_or_create(&CauseLabels::new(model.as_str(), cause.as_str()))
                .inc();
        }
    }
}

#[cfg(test)]
mod tests;
