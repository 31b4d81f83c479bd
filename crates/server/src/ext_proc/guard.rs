//! Resources and metrics of one exchange. The resources are RAII guards, so any end of the stream
//! releases them.
//!
//! Decision 0003.

mod measurements;
mod response_origin;
mod started_response;

use std::sync::Arc;
use std::time::Instant;

use tracing::debug;
use warmroute_core::block::BlockHashes;
use warmroute_core::health::RequestOutcome;
use warmroute_core::load::FirstTokenObservation;
use warmroute_core::router::{Mode, Router};
use warmroute_metrics::{Metrics, ModelRoleLabels, count_outcome};

use super::response_content::{MissingContent, ResponseContent};
use super::retries::RetryDecision;
use crate::dispatch::audit::CacheAudit;
use crate::dispatch::{ActiveRequest, Dispatcher, log_health_changes};
use crate::prefill::{PrefillEvent, PrefillInput, RemotePrefill};
use measurements::CacheReportSource;
use started_response::StartedResponse;

/// Resources and metrics of one exchange.
pub(super) struct ExchangeGuard {
    metrics: Arc<Metrics>,
    router: Arc<Router>,
    audit: Arc<CacheAudit>,
    arrived: Instant,
    active: Option<Box<ActiveRequest>>,
    /// The prefill on another worker, until the first token.
    prefill: Option<ExchangePrefill>,
    /// The model and the role of the decode worker.
    labels: Option<ModelRoleLabels>,
    /// The response with the cache report.
    cache_report_source: Option<CacheReportSource>,
    response: Option<StartedResponse>,
    end: ExchangeEnd,
    /// Output blocks booked so far. `None` if they do not count as load.
    output_blocks: Option<u64>,
}

/// The prefill on another worker.
struct ExchangePrefill {
    remote: RemotePrefill,
    completed_at: Option<Instant>,
}

/// Outcome of the exchange if its stream closes now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExchangeEnd {
    /// The response has not begun.
    Abandoned,
    /// The response has begun, and its end was not observed: it is complete, or the client
    /// disconnected.
    Closed,
    /// The end of the response was observed at this time.
    Complete(Instant),
    /// warmroute responded itself.
    Immediate,
}

impl ExchangeGuard {
    pub(super) fn open(metrics: Arc<Metrics>, router: Arc<Router>, audit: Arc<CacheAudit>) -> Self {
        metrics.ext_proc.open_exchanges.inc();
        Self {
            metrics,
            audit,
            arrived: Instant::now(),
            active: None,
            prefill: None,
            labels: None,
            cache_report_source: None,
            response: None,
            end: ExchangeEnd::Abandoned,
            output_blocks: router.settings().tracking.output_blocks.then_some(0),
            router,
        }
    }

    /// Records the placement of the request. `remote` is the prefill on another worker.
    fn on_placed(&mut self, remote: Option<RemotePrefill>) {
        let route = self.active.as_ref().map(|active| &active.placement.route);
        self.cache_report_source =
            route.map(|route| CacheReportSource::new(route, remote.as_ref(), &self.audit));
        self.prefill = remote.map(|remote| ExchangePrefill {
            // warmroute calls the prefill worker before it forwards the request, so the prefill is
            // complete.
            completed_at: matches!(remote, RemotePrefill::Call(_)).then(Instant::now),
            remote,
        });
    }

    pub(super) fn on_route(
        &mut self,
        active: Option<Box<ActiveRequest>>,
        remote_prefill: Option<RemotePrefill>,
    ) {
        self.labels = active.as_ref().map(|active| {
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
        match &mut self.prefill {
            Some(prefill) => prefill.remote.next_event().await,
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
        let (
            Some(ExchangePrefill {
                remote: RemotePrefill::Mirror(mirrored_prefill),
                completed_at,
            }),
            Some(active),
        ) = (&mut self.prefill, &mut self.active)
        else {
            return false;
        };
        match event {
            PrefillEvent::Done => {
                *completed_at = Some(Instant::now());
                self.router.complete_remote_prefill(&mut active.placement);
                false
            }
            PrefillEvent::Failed(failure) => {
                mirrored_prefill.on_failure(failure, &self.router, active);
                false
            }
            // The first token of a response that has begun may be missed by the probe.
            PrefillEvent::TimedOut if self.response.is_some() && !is_content_missing => false,
            PrefillEvent::TimedOut => {
                mirrored_prefill.on_timeout(&self.router, active);
                self.prefill = None;
                true
            }
        }
    }

    /// Runs another prefill for a request that is sent to another decode worker.
    pub(super) async fn prefill_retry(
        &mut self,
        dispatcher: &Dispatcher,
        input: PrefillInput,
    ) -> RetryDecision {
        // A request whose response has begun is not retried.
        let Some(prefill) = self.prefill.take() else {
            return RetryDecision::Unchanged;
        };
        let Some(active) = self.active.take() else {
            return RetryDecision::Unchanged;
        };
        // Boxed, because the future is large and retries are rare.
        let repeated = Box::pin(prefill.remote.retry(dispatcher, *active, input)).await;
        match repeated {
            Ok(repeated) => {
                self.active = Some(Box::new(repeated.active));
                self.on_placed(repeated.remote_prefill);
                repeated
                    .body
                    .map_or(RetryDecision::Unchanged, RetryDecision::ReplaceBody)
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
        if self.end == ExchangeEnd::Abandoned {
            self.end = ExchangeEnd::Closed;
        }
        let Some(response) = &mut self.response else {
            return;
        };
        // A unary response begins when it is complete, and the headers of an event stream precede
        // the computation.
        let is_measured = response.on_first_token(observed);
        let is_success = response.is_success();
        let head = response.head;
        // After the first token the prefill is complete.
        let prefill_completed_at = self.end_remote_prefill(is_success);
        // An error has no first token.
        if !is_success {
            return;
        }
        // A failed request may stay booked after its end, with its prefill.
        if !head.has_short_body
            && let Some(observation) = self.end_prefill(is_measured)
        {
            self.observe_prediction(observation);
        }
        self.report_outcome(if head.has_short_body {
            RequestOutcome::Empty
        } else {
            RequestOutcome::Delivered
        });
        self.observe_first_token(prefill_completed_at.filter(|_| head.is_event_stream));
    }

    /// Handles the end of a response without content.
    pub(super) fn on_content_missing(&mut self, missing: MissingContent) {
        let Some(response) = &mut self.response else {
            return;
        };
        response.content = ResponseContent::Missing(missing);
        if response.is_success() {
            debug!(?missing, "response without content");
            self.report_outcome(match missing {
                MissingContent::Empty => RequestOutcome::Empty,
                MissingContent::OutputEnded => RequestOutcome::NoOutput,
                MissingContent::OutputCounted => RequestOutcome::Delivered,
                MissingContent::Error => RequestOutcome::ServerError,
            });
        }
    }

    /// Ends the prefill on another worker, and returns the time at which it was reported complete.
    /// A mirrored prefill that is not complete is aborted.
    fn end_remote_prefill(&mut self, is_complete: bool) -> Option<Instant> {
        let prefill = self.prefill.take()?;
        if is_complete && let RemotePrefill::Mirror(mirrored_prefill) = prefill.remote {
            mirrored_prefill.complete();
        }
        prefill.completed_at
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
        let Some(response) = &mut self.response else {
            return;
        };
        let new_tokens = response.scan(chunk);
        let Some(active) = &mut self.active else {
            return;
        };
        if let Some(tokens) = new_tokens {
            self.router.on_output_tokens(&mut active.placement, tokens);
        }
        if let (Some(booked), Some(scan)) = (&mut self.output_blocks, &response.scan) {
            book_output(active, booked, scan.scanner.output_tokens());
        }
    }

    /// Releases all resources at the end of the response, although Envoy may keep the stream open.
    pub(super) fn on_completed(&mut self) {
        self.end = ExchangeEnd::Complete(Instant::now());
        let is_success = self.response_with_prefill().is_some();
        self.end_remote_prefill(is_success);
        let prompts = self.release();
        self.observe_duration();
        self.observe_usage();
        self.audit_response(prompts);
    }

    /// Releases the resources of the exchange. Returns the prompts if the response proves that they
    /// are cached.
    fn release(&mut self) -> Vec<BlockHashes> {
        if matches!(self.end, ExchangeEnd::Abandoned | ExchangeEnd::Closed) {
            self.report_outcome(RequestOutcome::Cancelled);
        }
        let Some(mut active) = self.active.take() else {
            return Vec::new();
        };
        let mut prompts = Vec::new();
        if let Some(response) = self.response_with_prefill() {
            let placement = &mut active.placement;
            if matches!(self.end, ExchangeEnd::Complete(_)) {
                self.router.on_completed_response(placement);
            }
            if let Some(cached) = response.usage().and_then(|usage| usage.cached_tokens) {
                self.router.apply_reported_cached_tokens(placement, cached);
            }
            if let Some(output) = response.complete_output() {
                placement.reservation.learn_output(output);
            }
            self.router.start_parity_check(placement);
            prompts = std::mem::take(&mut placement.prompts);
        }
        self.router.finish(active.placement);
        prompts
    }

    /// Returns the response, if it proves that the prompt's blocks are cached.
    fn response_with_prefill(&self) -> Option<&StartedResponse> {
        let response = self.response.as_ref()?;
        response.proves_prefill(self.end).then_some(response)
    }

    /// Reports the outcome of the request to the health of its ranks, unless one was reported.
    fn report_outcome(&mut self, outcome: RequestOutcome) {
        if let Some(active) = &mut self.active {
            let changes = self.router.report_outcome(&mut active.placement, outcome);
            log_health_changes(&self.router, changes);
        }
    }
}

/// Books an output block whenever prompt and output together begin another block.
fn book_output(active: &mut ActiveRequest, booked: &mut u64, generated: u64) {
    let route = &active.placement.route;
    let size = route.block_size.tokens() as u64;
    let grown =
        (route.prompt_tokens + generated).div_ceil(size) - route.prompt_tokens.div_ceil(size);
    let expected = route.expected_output_tokens;
    let fraction =
        expected.map(|expected| (1.0 - generated as f64 / expected.max(1) as f64).max(0.0));
    while *booked < grown {
        *booked += 1;
        active.placement.reservation.add_output_block(fraction);
        active.placement.predictions.add_output_block();
    }
}

impl Drop for ExchangeGuard {
    fn drop(&mut self) {
        self.release();
        self.metrics.ext_proc.open_exchanges.dec();
        let outcome = match self.end {
            ExchangeEnd::Abandoned => "cancelled",
            ExchangeEnd::Closed => "response_not_observed",
            ExchangeEnd::Complete(_) => "completed",
            ExchangeEnd::Immediate => "immediate_response",
        };
        count_outcome(&self.metrics.ext_proc.exchanges, outcome);
        if self.end == ExchangeEnd::Closed {
            self.observe_duration();
        }
        if !matches!(self.end, ExchangeEnd::Complete(_)) {
            self.observe_usage();
        }
    }
}

#[cfg(test)]
mod tests;
