//! Measurements of an exchange: times, output, and the comparison of the cache report with the
//! prediction.

use std::time::Instant;

use warmroute_core::block::BlockHashes;
use warmroute_core::load::FirstTokenObservation;
use warmroute_core::router::Route;
use warmroute_core::worker::ModelName;
use warmroute_metrics::{ModelLabel, ModelRoleLabels, ResponseLabels};

use super::started_response::UsageScan;
use super::{ExchangeEnd, ExchangeGuard};
use crate::dispatch::audit::{CacheAudit, HitForecast, ReportedUsage};
use crate::prefill::RemotePrefill;

/// The response that carries the cache report of the worker that computes the prompt.
#[derive(Debug)]
pub(super) enum CacheReportSource {
    /// The response of the exchange, whose worker computes the prompt.
    InResponse(Box<HitForecast>),
    /// The response of the prefill worker, which warmroute receives and audits itself.
    InPrefillResponse,
    /// The response of the prefill worker, which does not pass through warmroute.
    NotReceived(ModelName),
}

impl CacheReportSource {
    pub(super) fn new(
        route: &Route,
        remote_prefill: Option<&RemotePrefill>,
        audit: &CacheAudit,
    ) -> Self {
        let is_received = remote_prefill.is_some_and(RemotePrefill::receives_response);
        match route.prefill() {
            None => Self::InResponse(Box::new(audit.forecast(route))),
            Some(_) if is_received => Self::InPrefillResponse,
            Some(_) => Self::NotReceived(route.model.clone()),
        }
    }
}

fn model_label(labels: &ModelRoleLabels) -> ModelLabel {
    ModelLabel {
        model: labels.model.clone(),
    }
}

impl ExchangeGuard {
    /// Observes the time from the arrival of the request to the first token, and from the end of a
    /// prefill on another worker.
    pub(super) fn observe_first_token(&self, prefill_completed_at: Option<Instant>) {
        let Some(labels) = &self.labels else {
            return;
        };
        if let Some(completed_at) = prefill_completed_at {
            self.metrics
                .prefill
                .to_first_token_seconds
                .get_or_create(&model_label(labels))
                .observe(completed_at.elapsed().as_secs_f64());
        }
        self.metrics
            .requests
            .time_to_first_token_seconds
            .get_or_create(labels)
            .observe(self.arrived.elapsed().as_secs_f64());
    }

    /// Counts a response by model, class of its status and source.
    pub(super) fn count_response(&self, status: u16, source: &'static str) {
        let code_class = match status {
            100..200 => "1xx",
            200..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            500..600 => "5xx",
            _ => "other",
        };
        let model = self.labels.as_ref().map(|labels| labels.model.clone());
        let labels = ResponseLabels {
            model: model.unwrap_or_else(|| "unknown".into()),
            code_class,
            source,
        };
        self.metrics.requests.responses.get_or_create(&labels).inc();
    }

    /// Observes the ratio of an observed time to first token to the predicted one.
    pub(super) fn observe_prediction(&self, times: FirstTokenObservation) {
        if let Some(labels) = &self.labels
            && let Some(ratio) = times.ratio()
        {
            self.metrics
                .latency
                .first_token_ratio
                .get_or_create(&model_label(labels))
                .observe(ratio);
        }
    }

    /// Observes the duration of the exchange.
    pub(super) fn observe_duration(&self) {
        let Some(labels) = &self.labels else {
            return;
        };
        let elapsed = self.arrived.elapsed().as_secs_f64();
        self.metrics
            .requests
            .request_duration_seconds
            .get_or_create(labels)
            .observe(elapsed);
    }

    /// Ends the scan of the body, and observes its usage.
    pub(super) fn observe_usage(&mut self) {
        let Some(response) = &mut self.response else {
            return;
        };
        let Some(UsageScan { scanner, .. }) = response.scan.as_deref_mut() else {
            return;
        };
        if matches!(self.end, ExchangeEnd::Complete(_) | ExchangeEnd::Closed) {
            scanner.finish();
        }
        let Some(labels) = &self.labels else {
            return;
        };
        let usage = scanner.usage();
        let tokens = usage.map_or(scanner.output_tokens(), |usage| usage.completion_tokens);
        if tokens > 0 {
            self.metrics
                .requests
                .output_tokens
                .get_or_create(labels)
                .observe(tokens as f64);
        }
        if tokens > 1
            && let (Some(first), ExchangeEnd::Complete(completed)) =
                (response.first_token_at, self.end)
        {
            let duration = completed.saturating_duration_since(first).as_secs_f64();
            self.metrics
                .requests
                .inter_token_latency_seconds
                .get_or_create(labels)
                .observe(duration / (tokens - 1) as f64);
        }
        if let Some(reported) = usage.and_then(ReportedUsage::from_usage)
            && let Some(CacheReportSource::InResponse(forecast)) = &self.cache_report_source
        {
            self.audit.count_delivered_tokens(forecast, reported);
        }
    }

    /// Compares the cache report of a complete response with the prediction, if the response has
    /// succeeded and its body was scanned.
    pub(super) fn audit_response(&mut self, prompts: Vec<BlockHashes>) {
        let Some(response) = &self.response else {
            return;
        };
        if !response.is_success() || response.scan.is_none() {
            return;
        }
        let forecast = match self.cache_report_source.take() {
            Some(CacheReportSource::InResponse(forecast)) => *forecast,
            Some(CacheReportSource::NotReceived(model)) => {
                return self.audit.count_undecided(&model);
            }
            Some(CacheReportSource::InPrefillResponse) | None => return,
        };
        let usage = response.usage();
        let is_served_elsewhere = response.is_served_elsewhere;
        self.audit
            .record_usage(forecast, usage, prompts, is_served_elsewhere);
    }
}
