//! A client that replays a workload through a gateway and notes what a user would see: time to first token, errors, who
//! served, and what the engine says it had cached.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warmroute::openai::usage::UsageScanner;

use super::stack::MODEL;
use super::workload::{Session, Workload};

/// What became of one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    /// Why it counts as an error.
    pub(crate) error: Option<String>,
    /// Whose system prompt it had.
    pub(crate) group: usize,
    /// When it was sent, from the start of the workload.
    pub(crate) sent: Duration,
    pub(crate) ttft: Duration,
    /// Until the end of the answer.
    pub(crate) took: Duration,
    /// The longest time between two tokens.
    pub(crate) longest_pause: Duration,
    pub(crate) engine: Option<String>,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// As the engine delivered.
    pub(crate) cached_tokens: u64,
    /// As warmroute predicted, where it answered.
    pub(crate) predicted_tokens: Option<u64>,
    pub(crate) mode: Option<String>,
    /// Who did the prefill, where that was another worker.
    pub(crate) prefilled_by: Option<String>,
    /// The text of the answer.
    pub(crate) answer: String,
}

impl Sample {
    /// Whether the same engine had another request of the same group before its first token, while it had this one.
    fn is_prefilled_beside(&self, other: &Self) -> bool {
        let alike =
            self.group == other.group && self.engine == other.engine && !std::ptr::eq(self, other);
        alike && self.sent < other.sent + other.ttft && other.sent < self.sent + self.ttft
    }
}

/// Replays every session at its time and reports each finished request.
pub(crate) async fn run(
    url: String,
    workload: Workload,
    on_request: impl Fn(&Sample) + Send + Sync + 'static,
) -> Vec<Sample> {
    // A proxy from the environment has no business on the loopback.
    let client = warmroute::tls::client()
        .timeout(Duration::from_secs(120))
        .build()
        .unwrap_or_default();
    let (began, on_request) = (Instant::now(), Arc::new(on_request));
    let mut sessions = JoinSet::new();
    for session in workload.sessions {
        let (client, url, on_request) = (client.clone(), url.clone(), on_request.clone());
        sessions.spawn(async move {
            tokio::time::sleep(session.arrives.saturating_sub(began.elapsed())).await;
            converse(&client, &url, (&session, began), |sample| {
                on_request(sample)
            })
            .await
        });
    }
    sessions.join_all().await.into_iter().flatten().collect()
}

async fn converse(
    client: &reqwest::Client,
    url: &str,
    (session, began): (&Session, Instant),
    on_request: impl Fn(&Sample),
) -> Vec<Sample> {
    let mut samples = Vec::new();
    let mut answers = Vec::new();
    for turn in &session.turns {
        tokio::time::sleep(turn.think).await;
        let mut body = session.request(MODEL, &answers);
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let sent = began.elapsed();
        let sample = Sample {
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
pub(crate) async fn chat(client: &reqwest::Client, url: &str, body: &Value) -> Sample {
    let mut sample = Sample::default();
    if let Err(error) = stream(client, url, body, &mut sample).await {
        sample.error = Some(format!("{error:#}"));
    }
    sample
}

async fn stream(
    client: &reqwest::Client,
    url: &str,
    body: &Value,
    sample: &mut Sample,
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
    let (mut text, mut chunks) = (Vec::new(), response.bytes_stream());
    let (mut seen, mut last) = (0, Duration::ZERO);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        usage.push(&chunk);
        if usage.content_events() > seen {
            let now = sent.elapsed();
            match sample.ttft.is_zero() {
                true => sample.ttft = now,
                false => sample.longest_pause = sample.longest_pause.max(now - last),
            }
            (seen, last) = (usage.content_events(), now);
        }
        text.extend_from_slice(&chunk);
    }
    sample.took = sent.elapsed();
    usage.finish();
    anyhow::ensure!(usage.is_done(), "the stream ended before its end");
    let told = usage
        .usage()
        .ok_or_else(|| anyhow::anyhow!("the answer tells no usage"))?;
    sample.prompt_tokens = told.prompt_tokens;
    sample.completion_tokens = told.completion_tokens;
    sample.cached_tokens = told.cached_tokens.unwrap_or(0);
    sample.answer = content(&text);
    Ok(())
}

/// The text that the events of a chat stream add up to.
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
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    /// Share of all prompt tokens that the engines had cached.
    pub(crate) hit_rate: f64,
    pub(crate) ttft_ms: Percentiles,
    pub(crate) requests_per_worker: BTreeMap<String, usize>,
}

/// Of a distribution.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
}

impl Percentiles {
    /// Zeros where there is nothing.
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let rank = |share: f64| ((values.len() as f64 * share).ceil() as usize).saturating_sub(1);
        let at = |share: f64| values.get(rank(share)).copied().unwrap_or(0.0);
        Self {
            p50: at(0.50),
            p95: at(0.95),
            p99: at(0.99),
        }
    }
}

/// How the predictions came out.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Prediction {
    /// Requests with a prediction and a delivery.
    pub(crate) requests: usize,
    /// Of those: predicted and delivered are equal.
    pub(crate) exact: usize,
    /// Of the others: the engine delivered more, because a block was computed between the decision and the schedule.
    pub(crate) delivered_more: usize,
    /// Of those: the engine prefilled another request of the same group at the same time. Which of two that begin alike
    /// comes first is known to nobody when they are routed, and the second finds what the first has computed.
    pub(crate) beside_another: usize,
    /// Of the others: the engine delivered less, because a block was evicted in between.
    pub(crate) delivered_less: usize,
    pub(crate) mean_abs_error_tokens: f64,
}

pub(crate) fn figures(samples: &[Sample]) -> Figures {
    let good = || samples.iter().filter(|sample| sample.error.is_none());
    let (prompt, cached) = good().fold((0, 0), |(prompt, cached), sample| {
        (prompt + sample.prompt_tokens, cached + sample.cached_tokens)
    });
    let mut requests_per_worker = BTreeMap::new();
    for engine in good().filter_map(|sample| sample.engine.clone()) {
        *requests_per_worker.entry(engine).or_default() += 1;
    }
    Figures {
        hit_rate: if prompt == 0 {
            0.0
        } else {
            cached as f64 / prompt as f64
        },
        ttft_ms: Percentiles::of(
            good()
                .map(|sample| sample.ttft.as_secs_f64() * 1e3)
                .collect(),
        ),
        requests_per_worker,
    }
}

pub(crate) fn prediction(samples: &[Sample]) -> Prediction {
    let error =
        |sample: &Sample| Some(sample.cached_tokens as i64 - sample.predicted_tokens? as i64);
    let good: Vec<&Sample> = samples
        .iter()
        .filter(|sample| sample.error.is_none())
        .collect();
    let errors: Vec<i64> = good.iter().filter_map(|sample| error(sample)).collect();
    let more = good
        .iter()
        .filter(|sample| error(sample).is_some_and(|error| error > 0));
    let sum: u64 = errors.iter().map(|error| error.unsigned_abs()).sum();
    Prediction {
        requests: errors.len(),
        exact: errors.iter().filter(|error| **error == 0).count(),
        delivered_more: errors.iter().filter(|error| **error > 0).count(),
        beside_another: more
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

    /// Sent and answered with the first token at these milliseconds.
    fn sample(
        group: usize,
        engine: &str,
        (sent, first): (u64, u64),
        (predicted, cached): (u64, u64),
    ) -> Sample {
        Sample {
            group,
            engine: Some(engine.to_owned()),
            sent: Duration::from_millis(sent),
            ttft: Duration::from_millis(first - sent),
            predicted_tokens: Some(predicted),
            cached_tokens: cached,
            ..Sample::default()
        }
    }

    #[test]
    fn only_what_was_computed_beside_one_that_begins_alike_could_not_be_foreseen() {
        let other = sample(1, "a", (100, 200), (0, 0));
        let beside = |sample: Sample| {
            let told = prediction(&[other.clone(), sample]);
            assert_eq!(told.exact + told.delivered_more + told.delivered_less, 2);
            (told.delivered_more, told.beside_another)
        };
        assert_eq!(
            beside(sample(1, "a", (150, 300), (0, 16))),
            (1, 1),
            "behind it"
        );
        assert_eq!(
            beside(sample(1, "a", (50, 150), (0, 16))),
            (1, 1),
            "before it"
        );
        assert_eq!(
            beside(sample(1, "a", (201, 300), (0, 16))),
            (1, 0),
            "after its first token"
        );
        assert_eq!(
            beside(sample(1, "b", (150, 300), (0, 16))),
            (1, 0),
            "elsewhere"
        );
        assert_eq!(
            beside(sample(2, "a", (150, 300), (0, 16))),
            (1, 0),
            "of another group"
        );
        assert_eq!(
            beside(sample(1, "a", (150, 300), (16, 0))),
            (0, 0),
            "less than foreseen"
        );
        assert_eq!(
            beside(sample(1, "a", (150, 300), (16, 16))),
            (0, 0),
            "as foreseen"
        );
    }
}
