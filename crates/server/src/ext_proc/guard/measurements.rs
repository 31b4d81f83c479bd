//! Measurements of an exchange: times, output, and the comparison of the cache report with the
//! prediction.

use std::time::Instant;

use warmroute_core::load::FirstTokenObservation;
use warmroute_metrics::ResponseLabels;
use warmroute_tokens::openai::usage::TokenUsage;

use super::cache_report::CacheReportSource;
use super::{ExchangeEnd, ExchangeGuard};
use crate::dispatch::audit::{AuditedResponse, ReportedUsage};

impl ExchangeGuard {
    /// Observes the time from the end of the prefill, and from the arrival of the request, to the
    /// first token.
    pub(super) fn observe_first_token(&mut self) {
        let prefill_done = self.prefill_done.take().filter(|_| self.event_stream);
        if let (Some(done), Some(label)) = (prefill_done, &self.label) {
            self.metrics
                .prefill
                .to_first_token_seconds
                .get_or_create(label)
                .observe(done.elapsed().as_secs_f64());
        }
        if let Some(labels) = &self.role_labels {
            self.metrics
                .requests
                .time_to_first_token_seconds
                .get_or_create(labels)
                .observe(self.arrived.elapsed().as_secs_f64());
        }
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
        let model = self.label.as_ref().map(|label| label.model.clone());
        let labels = ResponseLabels {
            model: model.unwrap_or_else(|| "unknown".into()),
            code_class,
            source,
        };
        self.metrics.requests.responses.get_or_create(&labels).inc();
    }

    /// Observes the ratio of an observed time to first token to the predicted one.
    pub(super) fn observe_prediction(&self, times: FirstTokenObservation) {
        if let Some(label) = &self.label
            && let Some(ratio) = times.ratio()
        {
            self.metrics
                .latency
                .first_token_ratio
                .get_or_create(label)
                .observe(ratio);
        }
    }

    /// Observes the duration of the exchange.
    pub(super) fn observe_duration(&self) {
        let Some(labels) = &self.role_labels else {
            return;
        };
        let elapsed = self.arrived.elapsed().as_secs_f64();
        self.metrics
            .requests
            .request_duration_seconds
            .get_or_create(labels)
            .observe(elapsed);
    }

    /// Observes the output tokens, and the latency between them.
    pub(super) fn observe_output(&self, tokens: u64) {
        let Some(labels) = self.role_labels.as_ref().filter(|_| tokens > 0) else {
            return;
        };
        self.metrics
            .requests
            .output_tokens
            .get_or_create(labels)
            .observe(tokens as f64);
        let (Some(first), Some(completed)) = (self.first_token_at, self.completed_at) else {
            return;
        };
        if tokens > 1 {
            let latency =
                completed.saturating_duration_since(first).as_secs_f64() / (tokens - 1) as f64;
            self.metrics
                .requests
                .inter_token_latency_seconds
                .get_or_create(labels)
                .observe(latency);
        }
    }

    /// Compares the cache report with the prediction, if the whole response was observed and has
    /// succeeded.
    pub(super) fn audit_response(&mut self) {
        if !self.body_scanned
            || self.end != ExchangeEnd::Complete
            || !(200..300).contains(&self.status)
        {
            return;
        }
        let forecast = match self.cache_report_source.take() {
            Some(CacheReportSource::InResponse(forecast)) => *forecast,
            Some(CacheReportSource::NotReceived(model)) => {
                return self.audit.count_undecided(&model);
            }
            Some(CacheReportSource::InPrefillResponse) | None => return,
        };
        match self.usage.usage() {
            Some(TokenUsage {
                prompt_tokens,
                cached_tokens: Some(cached),
                ..
            }) if prompt_tokens > 0 => {
                let reported = ReportedUsage {
                    prompt_tokens,
                    cached_tokens: cached,
                };
                let prompts = std::mem::take(&mut self.prompts);
                let response = AuditedResponse::new(forecast, reported, prompts)
                    .with_served_elsewhere(self.served_elsewhere);
                self.audit.record_response(response, Instant::now());
            }
            usage => self
                .audit
                .record_without_report(&forecast.model, usage.is_some()),
        }
    }
}
