//! Metrics of a simulation.

use std::time::Duration;

use serde::Serialize;

use crate::cases::JudgeCase;
use crate::simulated_request::{CompletedRequest, SimulationResult, UnfinishedRequest};
use crate::worker_faults::FaultMetrics;

/// Limits of a good request: time to first token and time per output token, in seconds.
const GOOD_TTFT: f64 = 5.0;
const GOOD_TPOT: f64 = 0.05;
/// Scaled limit of the time to first token: a constant, and a part per prompt token, in seconds.
const SCALED_TTFT_BASE: f64 = 1.0;
const SCALED_TTFT_PER_TOKEN: f64 = 0.25e-3;

/// Metrics of one simulation. Times are in seconds, unless the name says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RunMetrics {
    /// Time to first token. Without a first token, the time until the end counts.
    pub(crate) ttft_mean: f64,
    /// Median time to first token.
    pub ttft_p50: f64,
    /// 95th percentile of the time to first token.
    pub ttft_p95: f64,
    /// 99th percentile of the time to first token.
    pub ttft_p99: f64,
    /// Median time per output token.
    pub tpot_p50: f64,
    /// 99th percentile of the time per output token.
    pub tpot_p99: f64,
    /// Mean time from arrival to last token.
    pub e2e_mean: f64,
    /// 99th percentile of the time from arrival to last token.
    pub e2e_p99: f64,
    /// Share of requests within the limits of first token and output tokens.
    pub(crate) goodput: f64,
    /// The same, with a limit of the first token that grows with the prompt.
    pub(crate) goodput_scaled: f64,
    /// Share of prompt tokens that were cached.
    pub(crate) hit_rate: f64,
    /// Completed requests.
    pub(crate) requests: usize,
    /// Requests that were running at the end.
    pub(crate) unfinished: usize,
    /// Observed divided by predicted time to first token, over all requests of the router.
    pub(crate) prediction_ratio: f64,
    /// Mean CPU time of a decision, in nanoseconds.
    pub(crate) decide_ns: f64,
    /// Metrics of the fault, in cases with one.
    #[serde(flatten)]
    pub(crate) fault: Option<FaultMetrics>,
}

impl RunMetrics {
    /// Computes the metrics of a simulation.
    pub(crate) fn new(case: &JudgeCase, result: &SimulationResult) -> Self {
        let completed = &result.completed;
        let ttft = SortedSamples::new(
            completed
                .iter()
                .map(CompletedRequest::ttft)
                .chain(result.unfinished.iter().map(|one| one.ttft(case.end_s))),
        );
        let several = completed.iter().filter(|one| one.output_tokens > 1);
        let tpot = SortedSamples::new(several.map(CompletedRequest::tpot));
        let e2e = SortedSamples::new(completed.iter().map(CompletedRequest::e2e));
        let total = completed.len() + result.unfinished.len();
        let share_of = |is_good: fn(&CompletedRequest) -> bool| {
            let good = completed.iter().filter(|one| is_good(one)).count();
            good as f64 / total.max(1) as f64
        };
        let input: usize = completed.iter().map(|one| one.input_tokens).sum();
        let cached: usize = completed.iter().map(|one| one.cached_tokens).sum();
        Self {
            ttft_mean: ttft.mean(),
            ttft_p50: ttft.quantile(0.5),
            ttft_p95: ttft.quantile(0.95),
            ttft_p99: ttft.quantile(0.99),
            tpot_p50: tpot.quantile(0.5),
            tpot_p99: tpot.quantile(0.99),
            e2e_mean: e2e.mean(),
            e2e_p99: e2e.quantile(0.99),
            goodput: share_of(CompletedRequest::is_good),
            goodput_scaled: share_of(CompletedRequest::is_good_for_length),
            hit_rate: cached as f64 / input.max(1) as f64,
            requests: completed.len(),
            unfinished: result.unfinished.len(),
            prediction_ratio: result.predictions.observed_seconds
                / result.predictions.predicted_seconds.max(f64::MIN_POSITIVE),
            decide_ns: mean_nanoseconds(result.decisions.total, result.decisions.count),
            fault: case
                .fault
                .map(|period| FaultMetrics::new(period, case.workers, &result.fault_log)),
        }
    }
}

fn mean_nanoseconds(total: Duration, count: u32) -> f64 {
    total.as_nanos() as f64 / f64::from(count.max(1))
}

impl CompletedRequest {
    /// Returns the time to first token, in seconds.
    fn ttft(&self) -> f64 {
        (self.first_token_ms - self.arrival_ms) / 1e3
    }

    /// Returns the mean time per output token after the first one, in seconds.
    fn tpot(&self) -> f64 {
        let later_tokens = self.output_tokens.max(2) - 1;
        (self.end_ms - self.first_token_ms) / 1e3 / later_tokens as f64
    }

    /// Returns the time from arrival to last token, in seconds.
    fn e2e(&self) -> f64 {
        (self.end_ms - self.arrival_ms) / 1e3
    }

    fn is_good(&self) -> bool {
        self.ttft() <= GOOD_TTFT && self.tpot() <= GOOD_TPOT
    }

    fn is_good_for_length(&self) -> bool {
        let limit = SCALED_TTFT_BASE + SCALED_TTFT_PER_TOKEN * self.input_tokens as f64;
        self.ttft() <= limit && self.tpot() <= GOOD_TPOT
    }
}

impl UnfinishedRequest {
    /// Returns the time to first token, or the time until the end, in seconds.
    fn ttft(&self, end_s: f64) -> f64 {
        let first_token_ms = self.first_token_ms.unwrap_or(end_s * 1e3);
        (first_token_ms - self.arrival_ms).max(0.0) / 1e3
    }
}

/// Sorted samples of a metric.
struct SortedSamples(Vec<f64>);

impl SortedSamples {
    fn new(samples: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = samples.collect();
        sorted.sort_by(f64::total_cmp);
        Self(sorted)
    }

    /// Returns 0 without samples.
    fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len().max(1) as f64
    }

    /// Returns the nearest sample, or 0 without samples.
    fn quantile(&self, quantile: f64) -> f64 {
        let last = self.0.len().saturating_sub(1) as f64;
        let position = (last * quantile).round() as usize;
        self.0.get(position).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile_is_the_nearest_sample() {
        let samples = SortedSamples::new((1..=100).rev().map(f64::from));
        assert_eq!(samples.quantile(0.0), 1.0);
        assert_eq!(samples.quantile(0.5), 51.0);
        assert_eq!(samples.quantile(0.99), 99.0);
        assert_eq!(samples.quantile(1.0), 100.0);
        assert_eq!(samples.mean(), 50.5);
        assert_eq!(SortedSamples::new(std::iter::empty()).quantile(0.5), 0.0);
    }

    #[test]
    fn request_without_first_token_counts_until_the_end() {
        let mut request = UnfinishedRequest {
            arrival_ms: 4_000.0,
            first_token_ms: None,
        };
        assert_eq!(request.ttft(10.0), 6.0);
        request.first_token_ms = Some(5_000.0);
        assert_eq!(request.ttft(10.0), 1.0);
    }

    #[test]
    fn good_request_meets_both_limits() {
        let request = CompletedRequest {
            arrival_ms: 0.0,
            first_token_ms: 4_000.0,
            end_ms: 8_000.0,
            input_tokens: 8_000,
            output_tokens: 101,
            cached_tokens: 0,
        };
        assert_eq!(request.tpot(), 0.04);
        assert!(request.is_good() && !request.is_good_for_length());
        assert!(
            !CompletedRequest {
                output_tokens: 51,
                ..request
            }
            .is_good()
        );
    }
}
