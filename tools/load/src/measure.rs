//! Measures one round of one setup with the cost of each process, and computes the median of
//! several rounds.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, ensure};
use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use warmroute_testbed::comparison;

use crate::client::{self, LoadPlan};
use crate::process_usage::{CpuTimes, MemoryUse};
use crate::setups::{LoadSetup, LoadSetups, SetupKind};

/// Results of one round; CPU times are microseconds per request.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RoundSample {
    pub(crate) requests: f64,
    pub(crate) per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) cpu_envoy: f64,
    /// CPU time of the external processor.
    pub cpu_server: f64,
    pub(crate) cpu_client: f64,
    pub(crate) cpu_engines: f64,
    pub(crate) rss_envoy_mib: f64,
    pub(crate) rss_server_mib: f64,
    pub(crate) peak_server_mib: f64,
    /// Messages from Envoy to the server, per request.
    pub messages: f64,
    /// Share of the requests that were routed by their prompt. It is zero for the bare server.
    pub(crate) by_prompt: f64,
    /// Tokens of a prompt, as counted by warmroute.
    pub(crate) prompt_tokens: f64,
    /// Durations of warmroute's decision stages in microseconds.
    pub(crate) stages: BTreeMap<String, f64>,
}

impl RoundSample {
    /// Returns the mean time in microseconds between two correctly routed requests.
    pub(crate) fn micros_apart(&self) -> f64 {
        1e6 / (self.per_second * self.by_prompt)
    }
}

/// Counters read before and after a round.
struct CounterReading {
    envoy: CpuTimes,
    server: CpuTimes,
    engines: CpuTimes,
    client: f64,
    messages: f64,
    stages: BTreeMap<String, (f64, f64)>,
}

impl CounterReading {
    async fn read(
        http: &reqwest::Client,
        setups: &LoadSetups,
        setup: &LoadSetup,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            messages: count_messages(http, setup).await?,
            stages: read_stages(http, setup).await?,
            envoy: CpuTimes::read(setup.envoy_pid()),
            server: setup.server_pid().map(CpuTimes::read).unwrap_or_default(),
            engines: CpuTimes::read(setups.engines.pid()),
            client: comparison::process_cpu_nanos(),
        })
    }
}

/// Runs one round of one setup.
pub(crate) async fn measure_round(
    http: &reqwest::Client,
    setups: &LoadSetups,
    setup: &LoadSetup,
    bodies: &Arc<Vec<Bytes>>,
    plan: &LoadPlan,
) -> anyhow::Result<RoundSample> {
    if let Some(pid) = setup.server_pid() {
        MemoryUse::reset_peak(pid).context("cannot reset the peak memory of the server")?;
    }
    let before = CounterReading::read(http, setups, setup).await?;
    let round = client::send_all(http, &setup.url(), bodies, plan).await?;
    let client = comparison::process_cpu_nanos();
    let after = CounterReading::read(http, setups, setup).await?;
    let name = setup.kind.name();
    ensure!(
        round.errors.is_empty(),
        "{name}: failed requests: {}; first error: {}",
        round.errors.len(),
        round.errors[0]
    );
    ensure!(
        !round.first_ms.is_empty(),
        "{name}: no request was answered"
    );
    let requests = round.first_ms.len() as f64;
    let by_prompt: usize = ["exact", "partial", "approximate"]
        .iter()
        .filter_map(|mode| round.modes.get(*mode))
        .sum();
    let memory = setup.server_pid().map(MemoryUse::read).unwrap_or_default();
    let stage = |(name, (sum, count)): (String, (f64, f64))| {
        let (sum_before, count_before) = before.stages.get(&name).copied().unwrap_or_default();
        (count > count_before).then(|| (name, (sum - sum_before) / (count - count_before)))
    };
    let mut stages: BTreeMap<_, _> = after.stages.into_iter().filter_map(stage).collect();
    Ok(RoundSample {
        requests,
        per_second: requests / round.elapsed.as_secs_f64(),
        p50_ms: comparison::quantile(&round.first_ms, 0.5),
        p99_ms: comparison::quantile(&round.first_ms, 0.99),
        cpu_envoy: after.envoy.micros_since(&before.envoy) / requests,
        cpu_server: after.server.micros_since(&before.server) / requests,
        cpu_client: (client - before.client) / 1e3 / requests,
        cpu_engines: after.engines.micros_since(&before.engines) / requests,
        rss_envoy_mib: MemoryUse::read(setup.envoy_pid()).resident,
        rss_server_mib: memory.resident,
        peak_server_mib: memory.peak,
        messages: (after.messages - before.messages) / requests,
        by_prompt: if setup.kind == SetupKind::Warmroute {
            by_prompt as f64 / requests
        } else {
            1.0
        },
        prompt_tokens: stages.remove(PROMPT_TOKENS).unwrap_or(0.0),
        stages,
    })
}

/// Returns the number of messages that Envoy has sent to the server.
async fn count_messages(http: &reqwest::Client, setup: &LoadSetup) -> anyhow::Result<f64> {
    let url = setup
        .deployment
        .envoy_setup()
        .admin_url("/stats?filter=stream_msgs_sent&format=json");
    let stats: Value = http.get(url).send().await?.json().await?;
    let stats = stats["stats"].as_array().into_iter().flatten();
    Ok(stats.filter_map(|stat| stat["value"].as_f64()).sum())
}

const STAGES: &str = "warmroute_decision_stage_duration_seconds";
const PROMPT_TOKENS: &str = "warmroute_prompt_tokens";

/// Returns the sums and counts of warmroute's duration metrics by stage, and of its prompt tokens.
async fn read_stages(
    http: &reqwest::Client,
    setup: &LoadSetup,
) -> anyhow::Result<BTreeMap<String, (f64, f64)>> {
    let mut stages = BTreeMap::<String, (f64, f64)>::new();
    if setup.kind != SetupKind::Warmroute {
        return Ok(stages);
    }
    let page = http
        .get(setup.deployment.admin_url("/metrics"))
        .send()
        .await?
        .text()
        .await?;
    for line in page.lines() {
        let Some((series, value)) = line.rsplit_once(' ') else {
            continue;
        };
        let Some((name, labels)) = series.split_once('{') else {
            continue;
        };
        let Some((name, suffix)) = name.rsplit_once('_') else {
            continue;
        };
        let is_sum = suffix == "sum";
        if !is_sum && suffix != "count" {
            continue;
        }
        let value = value.parse::<f64>()?;
        let (stage, value) = match name {
            // The metrics are in seconds, the report in microseconds.
            STAGES if is_sum => (labels.split('"').nth(1).unwrap_or_default(), value * 1e6),
            STAGES => (labels.split('"').nth(1).unwrap_or_default(), value),
            PROMPT_TOKENS => (PROMPT_TOKENS, value),
            _ => continue,
        };
        let (sum, count) = stages.entry(stage.to_owned()).or_default();
        *if is_sum { sum } else { count } += value;
    }
    Ok(stages)
}

/// Returns the median of each number over several rounds.
pub(crate) fn median_sample(rounds: &[RoundSample]) -> RoundSample {
    let of = |field: fn(&RoundSample) -> f64| {
        comparison::median(&rounds.iter().map(field).collect::<Vec<_>>())
    };
    let mut stages = BTreeMap::<String, Vec<f64>>::new();
    for (name, micros) in rounds.iter().flat_map(|round| &round.stages) {
        stages.entry(name.clone()).or_default().push(*micros);
    }
    RoundSample {
        requests: of(|round| round.requests),
        per_second: of(|round| round.per_second),
        p50_ms: of(|round| round.p50_ms),
        p99_ms: of(|round| round.p99_ms),
        cpu_envoy: of(|round| round.cpu_envoy),
        cpu_server: of(|round| round.cpu_server),
        cpu_client: of(|round| round.cpu_client),
        cpu_engines: of(|round| round.cpu_engines),
        rss_envoy_mib: of(|round| round.rss_envoy_mib),
        rss_server_mib: of(|round| round.rss_server_mib),
        peak_server_mib: of(|round| round.peak_server_mib),
        messages: of(|round| round.messages),
        by_prompt: of(|round| round.by_prompt),
        prompt_tokens: of(|round| round.prompt_tokens),
        stages: stages
            .into_iter()
            .map(|(name, micros)| (name, comparison::median(&micros)))
            .collect(),
    }
}
