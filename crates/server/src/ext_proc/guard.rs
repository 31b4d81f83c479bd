//! Resources and metrics of one exchange. The resources are RAII guards, so any end of the stream
//! releases them.
//!
//! Decision 0003.

mod cache_report;
mod measurements;
mod response_origin;

use std::sync::Arc;
use std::time::Instant;

use tracing::debug;

use cache_report::CacheReportSource;
use warmroute_core::block::BlockHashes;
use warmroute_core::health::RequestOutcome;
use warmroute_core::load::{CompleteOutput, FirstTokenObservation};
use warmroute_core::router::{Mode, Router};
use warmroute_metrics::{Metrics, ModelLabel, ModelRoleLabels, OutcomeLabel};
use warmroute_tokens::openai::usage::{TokenUsage, UsageScanner};

use super::response_content::{MissingContent, ResponseContent};
use super::retries::RetryDecision;
use crate::dispatch::audit::{CacheAudit, ReportedUsage};
use crate::dispatch::{ActiveRequest, Dispatcher, log_health_changes};
use crate::prefill::{PrefillEvent, RemotePrefill, RetriedRequest};

/// Resources and metrics of one exchange.
pub(super) struct ExchangeGuard {
    metrics: Arc<Metrics>,
    router: Arc<Router>,
    audit: Arc<CacheAudit>,
    arrived: Instant,
    active: Option<Box<ActiveRequest>>,
    /// The prefill on another worker, until the first token.
    remote_prefill: Option<RemotePrefill>,
    /// Time at which another worker completed the prefill. Removed at the first token.
    prefill_done: Option<Instant>,
    label: Option<ModelLabel>,
    /// The model and the role of the decode worker.
    role_labels: Option<ModelRoleLabels>,
    /// Time of the first token of a streamed response.
    first_token_at: Option<Instant>,
    /// Time of the end of the response.
    completed_at: Option<Instant>,
    /// The response with the cache report.
    cache_report_source: Option<CacheReportSource>,
    /// The prompts of the request, after its end.
    prompts: Vec<BlockHashes>,
    /// Whether another worker than the chosen one served the request.
    served_elsewhere: bool,
    /// Whether the usage scanner reads the response body.
    body_scanned: bool,
    /// Content of the response, observed by this filter or by the probe filter.
    content: ResponseContent,
    usage: Box<UsageScanner>,
    status: u16,
    /// Whether the response is a stream of events.
    event_stream: bool,
    /// Whether the body of the response is too short for an answer.
    has_short_body: bool,
    end: ExchangeEnd,
    /// Whether output blocks count as load.
    books_output_blocks: bool,
    /// Output blocks booked so far.
    output_blocks: u64,
    /// Output tokens reported to the load tracker so far, including the first one.
    output_tokens: u64,
}

/// Outcome of the exchange if its stream closes now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExchangeEnd {
    /// The response has not begun.
    Abandoned,
    /// The response has begun, and its end was not observed: it is complete, or the client
    /// disconnected.
    Closed,
    /// The end of the response was observed.
    Complete,
    /// warmroute responded itself.
    Immediate,
}

impl ExchangeGuard {
    pub(super) fn open(metrics: Arc<Metrics>, router: Arc<Router>, audit: Arc<CacheAudit>) -> Self {
        metrics.ext_proc.open_exchanges.inc();
        let now = Instant::now();
        Self {
            metrics,
            audit,
            arrived: now,
            active: None,
            remote_prefill: None,
            prefill_done: None,
            label: None,
            role_labels: None,
            first_token_at: None,
            completed_at: None,
            cache_report_source: None,
            prompts: Vec::new(),
            served_elsewhere: false,
            body_scanned: false,
            content: ResponseContent::default(),
            usage: Box::default(),
            status: 0,
            event_stream: false,
            has_short_body: false,
            end: ExchangeEnd::Abandoned,
            books_output_blocks: router.settings().tracking.output_blocks,
            output_blocks: 0,
            output_tokens: 1,
            router,
        }
    }

    /// Records the placement of the request. `remote_prefill` is the prefill on another worker.
    fn on_placed(&mut self, remote_prefill: Option<RemotePrefill>) {
        let route = self.active.as_ref().map(|active| &active.placement.route);
        self.cache_report_source =
            route.map(|route| CacheReportSource::new(route, remote_prefill.as_ref(), &self.audit));
        // warmroute calls the prefill worker before it forwards the request, so the prefill is
        // complete.
        self.prefill_done =
            matches!(remote_prefill, Some(RemotePrefill::Call(_))).then(Instant::now);
        self.remote_prefill = remote_prefill;
    }

    pub(super) fn on_route(
        &mut self,
        active: Option<Box<ActiveRequest>>,
        remote_prefill: Option<RemotePrefill>,
    ) {
        self.label = active
            .as_ref()
            .map(|active| ModelLabel::from(&active.placement.route.model));
        self.role_labels = active.as_ref().map(|active| {
            let route = &active.placement.route;
            ModelRoleLabels::new(&route.model, self.router.role_of(route.to.rank))
        });
        self.active = active;
        self.on_placed(remote_prefill);
    }

    /// Records that warmroute responds itself.
    pub(super) fn on_immediate(&mut self, status: u16) {
        self.end = ExchangeEnd::Immediate;
        self.count_response(status, "warmroute");
    }

    /// Completes at the next event of the prefill on another worker.
    pub(super) async fn next_prefill_event(&mut self) -> PrefillEvent {
        match &mut self.remote_prefill {
            Some(remote_prefill) => remote_prefill.next_event().await,
            None => std::future::pending().await,
        }
    }

    /// Handles an event of the mirrored prefill. `is_content_missing` is true if the response has
    /// begun and is known to have no content so far. Returns whether the request has failed.
    pub(super) fn on_prefill_event(
        &mut self,
        event: &PrefillEvent,
        is_content_missing: bool,
    ) -> bool {
        let (Some(RemotePrefill::Mirror(mirrored_prefill)), Some(active)) =
            (&self.remote_prefill, &mut self.active)
        else {
            return false;
        };
        match event {
            PrefillEvent::Done => {
                self.prefill_done = Some(Instant::now());
                self.router.complete_remote_prefill(&mut active.placement);
                false
            }
            PrefillEvent::Failed(failure) => {
                mirrored_prefill.on_failure(failure, &self.router, active);
                false
            }
            // The first token of a response that has begun may be missed by the probe.
            PrefillEvent::TimedOut if self.status != 0 && !is_content_missing => false,
            PrefillEvent::TimedOut => {
                mirrored_prefill.on_timeout(&self.router, active);
                self.remote_prefill = None;
                true
            }
        }
    }

    /// Runs another prefill for a request that is sent to another decode worker.
    pub(super) async fn prefill_retry(
        &mut self,
        dispatcher: &Dispatcher,
        retried: RetriedRequest,
    ) -> RetryDecision {
        // A request whose response has begun is not retried.
        let Some(remote_prefill) = self.remote_prefill.take() else {
            return RetryDecision::Unchanged;
        };
        let Some(active) = self.active.take() else {
            return RetryDecision::Unchanged;
        };
        // Boxed, because the future is large and retries are rare.
        let repeated = Box::pin(remote_prefill.retry(dispatcher, active, retried)).await;
        match repeated {
            Ok(repeated) => {
                self.active = Some(repeated.active);
                self.on_placed(Some(repeated.remote_prefill));
                RetryDecision::ReplaceBody(repeated.body)
            }
            Err(error) => {
                debug!(%error, "retry failed");
                RetryDecision::Abandoned
            }
        }
    }

    /// Handles the first token of the response, which was `observed` or is assumed to arrive with
    /// the headers.
    pub(super) fn on_first_token(&mut self, observed: bool) {
        self.content = match (observed, self.event_stream) {
            (true, _) => ResponseContent::Delivered,
            (false, false) => ResponseContent::Assumed,
            (false, true) => self.content,
        };
        self.end = self.end_at_least(ExchangeEnd::Closed);
        // An error has no first token.
        let is_success = (200..300).contains(&self.status);
        // After the first token the prefill is complete.
        self.end_remote_prefill(is_success);
        // A unary response begins when it is complete, and the headers of an event stream precede
        // the computation.
        let is_measured = is_success && observed && self.event_stream;
        // A failed request may stay booked after its end, with its prefill.
        let is_delivered = is_success && !self.has_short_body;
        if is_delivered && let Some(observation) = self.end_prefill(is_measured) {
            self.observe_prediction(observation);
        }
        if is_success {
            self.report_outcome(if is_delivered {
                RequestOutcome::Delivered
            } else {
                RequestOutcome::Empty
            });
            self.observe_first_token();
        } else {
            self.prefill_done = None;
        }
        if is_success && observed && self.event_stream {
            self.first_token_at.get_or_insert_with(Instant::now);
        }
    }

    /// Handles the end of a response without content.
    pub(super) fn on_content_missing(&mut self, missing: MissingContent) {
        self.content = ResponseContent::Missing(missing);
        if (200..300).contains(&self.status) {
            debug!(?missing, "response without content");
            self.report_outcome(match missing {
                MissingContent::Empty => RequestOutcome::Empty,
                MissingContent::OutputEnded => RequestOutcome::NoOutput,
                MissingContent::OutputCounted => RequestOutcome::Delivered,
                MissingContent::Error => RequestOutcome::ServerError,
            });
        }
    }

    /// Ends the prefill on another worker. A mirrored prefill that is not complete is aborted.
    fn end_remote_prefill(&mut self, is_complete: bool) {
        if let Some(RemotePrefill::Mirror(mirrored_prefill)) =
            self.remote_prefill.take().filter(|_| is_complete)
        {
            mirrored_prefill.complete();
        }
    }

    /// Ends the prefill share at the first token, whose time was measured or is unknown. Returns the
    /// predicted and observed times to first token, if they were learned.
    fn end_prefill(&mut self, is_measured: bool) -> Option<FirstTokenObservation> {
        let placement = &mut self.active.as_mut()?.placement;
        let is_first = !placement.reservation.has_first_token();
        if !is_measured {
            placement.reservation.on_unobserved_first_token();
            return None;
        }
        placement.reservation.on_first_token();
        // Latency is learned only if all tokens of the prompt are known. The number of cached tokens
        // may still be a prediction.
        let route = &placement.route;
        let is_known =
            matches!(route.mode, Mode::Exact | Mode::Approximate) && route.reason.is_none();
        if !is_first || !is_known {
            return None;
        }
        self.router.learn_first_token(placement)
    }

    pub(super) fn on_response_chunk(&mut self, chunk: &[u8]) {
        self.body_scanned = true;
        let had_usage = self.usage.usage().is_some();
        let events = self.usage.content_events();
        self.usage.push(chunk);
        let is_final_usage = self.usage.usage().is_some() && !had_usage;
        let has_content = self.usage.content_events() > events;
        if self.event_stream && has_content && !is_final_usage {
            self.count_output(chunk.len());
        }
        if self.books_output_blocks {
            self.book_output();
        }
    }

    /// Reports the new output tokens of a chunk to the load tracker. The usage at the end of a stream
    /// is not counted, because it may correct the number of tokens at once. A token has at least one
    /// byte.
    fn count_output(&mut self, chunk_bytes: usize) {
        let generated = self.usage.output_tokens();
        if let Some(active) = &mut self.active
            && generated > self.output_tokens
        {
            let count = (generated - self.output_tokens).min(chunk_bytes as u64);
            self.router.on_output_tokens(&mut active.placement, count);
            self.output_tokens = generated;
        }
    }

    /// Books an output block whenever prompt and output together begin another block.
    fn book_output(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        let route = &active.placement.route;
        let size = route.block_size.tokens() as u64;
        let generated = self.usage.output_tokens();
        let grown =
            (route.prompt_tokens + generated).div_ceil(size) - route.prompt_tokens.div_ceil(size);
        let expected = route.expected_output_tokens;
        let fraction =
            expected.map(|expected| (1.0 - generated as f64 / expected.max(1) as f64).max(0.0));
        while self.output_blocks < grown {
            self.output_blocks += 1;
            active.placement.reservation.add_output_block(fraction);
            active.placement.add_output_block();
        }
    }

    /// Releases all resources at the end of the response, although Envoy may keep the stream open.
    pub(super) fn on_completed(&mut self) {
        self.end = ExchangeEnd::Complete;
        self.completed_at = Some(Instant::now());
        let is_success = (200..300).contains(&self.status);
        self.end_remote_prefill(is_success && !self.content.excludes_prefill());
        self.release();
        self.observe_duration();
        // The last event may lack the empty line that ends it.
        self.usage.finish();
    }

    /// Releases the resources of the exchange. A successful response proves that the prompt's
    /// blocks are cached. The headers of an event stream do not: they precede the computation, and
    /// the client may disconnect before the first token.
    fn release(&mut self) {
        let has_begun = match self.end {
            ExchangeEnd::Complete => !self.content.excludes_prefill(),
            ExchangeEnd::Closed => self.content == ResponseContent::Delivered || !self.event_stream,
            ExchangeEnd::Abandoned | ExchangeEnd::Immediate => false,
        };
        let is_success = has_begun && (200..300).contains(&self.status);
        if matches!(self.end, ExchangeEnd::Abandoned | ExchangeEnd::Closed) {
            self.report_outcome(RequestOutcome::Cancelled);
        }
        let Some(mut active) = self.active.take() else {
            return;
        };
        if is_success {
            if self.end == ExchangeEnd::Complete {
                self.router.on_completed_response(&active.placement);
            }
            if let Some(cached) = self.usage.usage().and_then(|usage| usage.cached_tokens) {
                self.router
                    .apply_reported_cached_tokens(&mut active.placement, cached);
            }
            if let Some(output) = self.complete_output() {
                active.placement.reservation.learn_output(output);
            }
            self.router.start_parity_check(&mut active.placement);
            self.prompts = active.placement.take_prompts();
        }
        self.router.finish(active.placement);
    }

    /// Reports the outcome of the request to the health of its ranks, unless one was reported.
    fn report_outcome(&mut self, outcome: RequestOutcome) {
        if let Some(active) = &mut self.active {
            let changes = self.router.report_outcome(&mut active.placement, outcome);
            log_health_changes(&self.router, changes);
        }
    }

    /// Returns the answer to learn from. A stream whose end was not observed may have been cancelled,
    /// but its time is all that is known with `gateway.observe: first_token`.
    fn complete_output(&self) -> Option<CompleteOutput> {
        let reported = self.usage.usage().map(|usage| usage.completion_tokens);
        if self.event_stream {
            // The length has the unit of the learned steps: an event may have several tokens.
            let counted = Some(self.output_tokens).filter(|tokens| *tokens > 1);
            let tokens = counted.or(reported);
            Some(CompleteOutput::Stream { tokens })
        } else {
            let tokens = reported.filter(|tokens| *tokens > 0)?;
            Some(CompleteOutput::Unary { tokens })
        }
    }

    fn end_at_least(&self, end: ExchangeEnd) -> ExchangeEnd {
        if matches!(self.end, ExchangeEnd::Complete | ExchangeEnd::Immediate) {
            self.end
        } else {
            end
        }
    }
}

impl Drop for ExchangeGuard {
    fn drop(&mut self) {
        self.release();
        self.metrics.ext_proc.open_exchanges.dec();
        let outcome = match self.end {
            ExchangeEnd::Abandoned => "cancelled",
            ExchangeEnd::Closed => "response_not_observed",
            ExchangeEnd::Complete => "completed",
            ExchangeEnd::Immediate => "immediate_response",
        };
        self.metrics
            .ext_proc
            .exchanges
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
        if self.end == ExchangeEnd::Closed {
            self.observe_duration();
            self.usage.finish();
        }
        if self.label.is_none() {
            return;
        }
        let usage = self.usage.usage();
        let output = usage.map_or(self.usage.output_tokens(), |usage| usage.completion_tokens);
        self.observe_output(output);
        if let Some(TokenUsage {
            prompt_tokens,
            cached_tokens: Some(cached),
            ..
        }) = usage
            && let Some(CacheReportSource::InResponse(forecast)) = &self.cache_report_source
        {
            self.audit.count_delivered_tokens(
                forecast,
                ReportedUsage {
                    prompt_tokens,
                    cached_tokens: cached,
                },
            );
        }
        self.audit_response();
    }
}

#[cfg(test)]
mod tests;
