//! A client that replays a workload through a gateway. It records the figures that a user observes:
//! time to first token, errors, the serving engine, and the reported cached tokens.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warmroute_tokens::openai::usage::UsageScanner;

use crate::deployment::MODEL;
use crate::workload::{ChatSession, ChatWorkload};

/// Result of one request.
#[derive(Clone, Debug, Default)]
pub struct RequestSample {
    /// The error, if the request failed.
    pub error: Option<String>,
    /// Group of its system prompt.
    pub group: usize,
    /// Time of sending, from the start of the workload.
    pub sent: Duration,
    /// Time to the first token.
    pub ttft: Duration,
    /// Time to the end of the answer.
    pub duration: Duration,
    /// The longest time between two tokens.
    pub longest_pause: Duration,
    /// Engine that answered.
    pub engine: Option<String>,
    /// Prompt tokens reported by the engine.
    pub prompt_tokens: u64,
    /// Generated tokens reported by the engine.
    pub completion_tokens: u64,
    /// Cached tokens reported by the engine.
    pub cached_tokens: u64,
    /// Cached tokens predicted by warmroute, if it responded.
    pub predicted_tokens: Option<u64>,
    /// Reported route mode.
    pub mode: Option<String>,
    /// Worker that computed the prefill, if it differs from the engine that answered.
    pub prefilled_by: Option<String>,
    /// The text of the answer.
    pub answer: String,
}

impl RequestSample {
    /// Returns the mean time between two tokens of the answer. `None` if it has fewer than two tokens.
    pub fn seconds_per_token(&self) -> Option<f64> {
        let gaps = self.completion_tokens.checked_sub(1)?;
        (gaps > 0).then(|| (self.duration - self.ttft).as_secs_f64() / gaps as f64)
    }

    /// Returns true if the same engine prefilled another request of the same group at the same
    /// time.
    fn is_prefilled_beside(&self, other: &Self) -> bool {
        let alike =
            self.group == other.group && self.engine == other.engine && !std::ptr::eq(self, other);
        alike && self.sent < other.sent + other.ttft && other.sent < self.sent + self.ttft
    }
}

/// Replays every session at its start time and reports each finished request.
pub async fn run(
    url: String,
    workload: ChatWorkload,
    on_request: impl Fn(&RequestSample) + Send + Sync + 'static,
) -> Vec<RequestSample> {
    // On loopback, a proxy from the environment must not be used.
    let client = warmroute_runtime::tls::http_client_builder()
        .timeout(Duration::from_secs(120))
        .build()
        .unwrap_or_default();
    let began = Instant::now();
    let on_request = Arc::new(on_request);
    let mut sessions = JoinSet::new();
    for session in workload.sessions {
        let client = client.clone();
        let url = url.clone();
        let on_request = on_request.clone();
        sessions.spawn(async move {
            tokio::time::sleep(session.arrives.saturating_sub(began.elapsed())).await;
            run_session(&client, &url, &session, began, |sample| on_request(sample)).await
        });
    }
    sessions.join_all().await.into_iter().flatten().collect()
}

/// Sends the turns of a session, each after the previous answer. Ends after the first error.
async fn run_session(
    client: &reqwest::Client,
    url: &str,
    session: &ChatSession,
    began: Instant,
    on_request: impl Fn(&RequestSample),
) -> Vec<RequestSample> {
    let mut samples = Vec::new();
    let mut answers = Vec::new();
    for turn in &session.turns {
        tokio::time::sleep(turn.think).await;
        let mut body = session.request(MODEL, &answers);
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let sent = began.elapsed();
        let sample = RequestSample {
            group: session.group,
            sent,
            ..chat(client, url, &body).await
        };
        on_request(&sample);
        let failed = sample.error.is_some();
        answers.push(sample.answer.clone());
        samples.push(sample);
        if failed {
            break;
        }
    }
    samples
}

/// Sends one streaming chat request.
pub async fn chat(client: &reqwest::Client, url: &str, body: &Value) -> RequestSample {
    let mut sample = RequestSample::default();
    if let Err(error) = stream(client, url, body, &mut sample).await {
        sample.error = Some(format!("{error:#}"));
    }
    sample
}

async fn stream(
    client: &reqwest::Client,
    url: &str,
    body: &Value,
    sample: &mut RequestSample,
) -> anyhow::Result<()> {
    let sent = Instant::now();
    let response = client.post(url).json(body).send().await?;
    let header = |name: &str| {
        response
            .headers()
            .get(name)
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned)
    };
    sample.engine = header("x-engine-id");
    sample.mode = header("x-warmroute-mode");
    sample.prefilled_by = header("x-prefill-instance-id");
    sample.predicted_tokens =
        header("x-warmroute-predicted-cached-tokens").and_then(|tokens| tokens.parse().ok());
    anyhow::ensure!(
        response.status().is_success(),
        "status {}",
        response.status()
    );
    let mut usage = UsageScanner::default();
    let mut text = Vec::new();
    let mut chunks = response.bytes_stream();
    let mut seen = 0;
    let mut last = Duration::ZERO;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        usage.push(&chunk);
        if usage.content_events() > seen {
            let now = sent.elapsed();
            if sample.ttft.is_zero() {
                sample.ttft = now;
            } else {
                sample.longest_pause = sample.longest_pause.max(now - last);
            }
            seen = usage.content_events();
            last = now;
        }
        text.extend_from_slice(&chunk);
    }
    sample.duration = sent.elapsed();
    usage.finish();
    anyhow::ensure!(
        usage.is_complete(),
        "the stream ended without its final event"
    );
    let reported = usage
        .usage()
        .ok_or_else(|| anyhow::anyhow!("the answer reports no usage"))?;
    sample.prompt_tokens = reported.prompt_tokens;
    sample.completion_tokens = reported.completion_tokens;
    sample.cached_tokens = reported.cached_tokens.unwrap_or(0);
    sample.answer = content(&text);
    Ok(())
}

/// Returns the concatenated text of a chat stream's events.
fn content(stream: &[u8]) -> String {
    let text = String::from_utf8_lossy(stream);
    let events = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    events
        .filter_map(|event| {
            Some(
                event
                    .pointer("/choices/0/delta/content")?
                    .as_str()?
                    .to_owned(),
            )
        })
        .collect()
}

/// The figures of one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReplaySummary {
    /// Share of all prompt tokens that the engines had cached.
    pub hit_rate: f64,
    /// Times to first token in milliseconds.
    pub ttft_ms: LatencySummary,
    /// Mean times between two tokens of an answer in milliseconds.
    pub token_ms: LatencySummary,
    /// Times to the end of the answer in milliseconds.
    pub e2e_ms: LatencySummary,
    /// Number of answers by worker.
    pub requests_per_worker: BTreeMap<String, usize>,
}

/// Mean and percentiles of a distribution of times.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LatencySummary {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl LatencySummary {
    /// Returns the mean and the percentiles; zeros for an empty list.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let rank = |share: f64| ((values.len() as f64 * share).ceil() as usize).saturating_sub(1);
        let at = |share: f64| values.get(rank(share)).copied().unwrap_or(0.0);
        Self {
            mean: values.iter().sum::<f64>() / values.len().max(1) as f64,
            p50: at(0.50),
            p95: at(0.95),
            p99: at(0.99),
        }
    }
}

/// Accuracy of the predictions.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PredictionAccuracy {
    /// Requests with a prediction and a reported number.
    pub requests: usize,
    /// Requests with equal numbers.
    pub exact: usize,
    /// Requests with more cached tokens than predicted: another request computed a block between
    /// decision and scheduling.
    pub delivered_more: usize,
    /// Those of them for which the engine prefilled another request of the same group at the same
    /// time. When two requests with a common prefix are routed, their order on the engine is
    /// unknown, and the second hits the blocks of the first.
    pub beside_another: usize,
    /// Requests with fewer cached tokens than predicted: a block was evicted in between.
    pub delivered_less: usize,
    /// Mean absolute difference in tokens.
    pub mean_abs_error_tokens: f64,
}

/// Summarizes the successful requests.
pub fn summarize(samples: &[RequestSample]) -> ReplaySummary {
    let good = || samples.iter().filter(|sample| sample.error.is_none());
    let (prompt, cached) = good().fold((0, 0), |(prompt, cached), sample| {
        (prompt + sample.prompt_tokens, cached + sample.cached_tokens)
    });
    let latency = |time: fn(&RequestSample) -> Duration| {
        let times = good().map(|sample| time(sample).as_secs_f64() * 1e3);
        LatencySummary::of(times.collect())
    };
    let mut requests_per_worker = BTreeMap::new();
    for engine in good().filter_map(|sample| sample.engine.clone()) {
        *requests_per_worker.entry(engine).or_default() += 1;
    }
    ReplaySummary {
        hit_rate: if prompt == 0 {
            0.0
        } else {
            cached as f64 / prompt as f64
        },
        ttft_ms: latency(|sample| sample.ttft),
        token_ms: LatencySummary::of(
            good()
                .filter_map(RequestSample::seconds_per_token)
                .map(|seconds| seconds * 1e3)
                .collect(),
        ),
        e2e_ms: latency(|sample| sample.duration),
        requests_per_worker,
    }
}

/// Compares predicted with reported cached tokens.
pub fn measure_predictions(samples: &[RequestSample]) -> PredictionAccuracy {
    let error = |sample: &RequestSample| {
        Some(sample.cached_tokens as i64 - sample.predicted_tokens? as i64)
    };
    let good: Vec<&RequestSample> = samples
        .iter()
        .filter(|sample| sample.error.is_none())
        .collect();
    let errors: Vec<i64> = good.iter().filter_map(|sample| error(sample)).collect();
    let underpredicted = good
        .iter()
        .filter(|sample| error(sample).is_some_and(|error| error > 0));
    let sum: u64 = errors.iter().map(|error| error.unsigned_abs()).sum();
    PredictionAccuracy {
        requests: errors.len(),
        exact: errors.iter().filter(|error| **error == 0).count(),
        delivered_more: errors.iter().filter(|error| **error > 0).count(),
        beside_another: underpredicted
            .filter(|sample| good.iter().any(|other| sample.is_prefilled_beside(other)))
            .count(),
        delivered_less: errors.iter().filter(|error| **error < 0).count(),
        mean_abs_error_tokens: if errors.is_empty() {
            0.0
        } else {
            sum as f64 / errors.len() as f64
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a sample that was sent, and got its first token, at these milliseconds.
    fn sample(
        group: usize,
        engine: &str,
        [sent, first]: [u64; 2],
        [predicted, cached]: [u64; 2],
    ) -> RequestSample {
        RequestSample {
            group,
            engine: Some(engine.to_owned()),
            sent: Duration::from_millis(sent),
            ttft: Duration::from_millis(first - sent),
            predicted_tokens: Some(predicted),
            cached_tokens: cached,
            ..RequestSample::default()
        }
    }

    #[test]
    fn concurrent_prefill_of_shared_prefix_is_unpredictable() {
        let other = sample(1, "a", [100, 200], [0, 0]);
        let measure_with_other = |sample: RequestSample| {
            let reported = measure_predictions(&[other.clone(), sample]);
            assert_eq!(
                reported.exact + reported.delivered_more + reported.delivered_less,
                2
            );
            (reported.delivered_more, reported.beside_another)
        };
        assert_eq!(
            measure_with_other(sample(1, "a", [150, 300], [0, 16])),
            (1, 1),
            "after the other request"
        );
        assert_eq!(
            measure_with_other(sample(1, "a", [50, 150], [0, 16])),
            (1, 1),
            "before the other request"
        );
        assert_eq!(
            measure_with_other(sample(1, "a", [201, 300], [0, 16])),
            (1, 0),
            "after the first token of the other request"
        );
        assert_eq!(
            measure_with_other(sample(1, "b", [150, 300], [0, 16])),
            (1, 0),
            "on another engine"
        );
        assert_eq!(
            measure_with_other(sample(2, "a", [150, 300], [0, 16])),
            (1, 0),
            "of another group"
        );
        assert_eq!(
            measure_with_other(sample(1, "a", [150, 300], [16, 0])),
            (0, 0),
            "less than predicted"
        );
        assert_eq!(
            measure_with_other(sample(1, "a", [150, 300], [16, 16])),
            (0, 0),
            "as predicted"
        );
    }
}
