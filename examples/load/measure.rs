//! One round on one way, with what it cost each process, and the middle of several.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::ensure;
use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use crate::bed::{Bed, Side, Way};
use crate::client::{self, Plan};
use crate::duel;
use crate::meter::{Cpu, Memory};

/// What one round showed; times of CPU are microseconds per request.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sample {
    pub(crate) requests: f64,
    pub(crate) per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) cpu_envoy: f64,
    pub(crate) cpu_server: f64,
    pub(crate) cpu_client: f64,
    pub(crate) cpu_engines: f64,
    pub(crate) rss_envoy_mib: f64,
    pub(crate) rss_server_mib: f64,
    pub(crate) peak_server_mib: f64,
    /// Messages from Envoy to the server, by request.
    pub(crate) messages: f64,
    /// Share of the requests that were routed by their prompt; the bare server routes none, and that is right.
    pub(crate) by_prompt: f64,
    /// Tokens of a prompt, as warmroute counted them.
    pub(crate) prompt_tokens: f64,
    /// What the stages of warmroute's decision took, in microseconds.
    pub(crate) stages: BTreeMap<String, f64>,
}

impl Sample {
    /// Microseconds from one request that was routed as it should be to the next.
    pub(crate) fn micros_apart(&self) -> f64 {
        1e6 / (self.per_second * self.by_prompt)
    }
}

/// What is read before and after.
struct Reading {
    envoy: Cpu,
    server: Cpu,
    engines: Cpu,
    client: f64,
    messages: f64,
    stages: BTreeMap<String, (f64, f64)>,
}

impl Reading {
    async fn take(http: &reqwest::Client, bed: &Bed, way: &Way) -> anyhow::Result<Self> {
        let (messages, stages) = (messages(http, way).await?, stages(http, way).await?);
        Ok(Self {
            envoy: Cpu::of(way.envoy()),
            server: way.server().map(Cpu::of).unwrap_or_default(),
            engines: Cpu::of(bed.engines.pid()),
            client: duel::process_cpu(),
            messages,
            stages,
        })
    }
}

/// Drives one way.
pub(crate) async fn round(
    http: &reqwest::Client,
    (bed, way): (&Bed, &Way),
    bodies: &Arc<Vec<Bytes>>,
    plan: &Plan,
) -> anyhow::Result<Sample> {
    let before = Reading::take(http, bed, way).await?;
    let round = client::drive(http, &way.url(), bodies, plan).await?;
    let client = duel::process_cpu();
    let after = Reading::take(http, bed, way).await?;
    let name = way.side.name();
    ensure!(
        round.errors.is_empty(),
        "{name}: {} requests failed, the first: {}",
        round.errors.len(),
        round.errors[0]
    );
    ensure!(!round.first.is_empty(), "{name}: no request was answered");
    let requests = round.first.len() as f64;
    let by_prompt: usize = ["exact", "partial", "approximate"]
        .iter()
        .filter_map(|mode| round.modes.get(*mode))
        .sum();
    let memory = way.server().map(Memory::of).unwrap_or_default();
    let stage = |(name, (sum, count)): (String, (f64, f64))| {
        let (sum_before, count_before) = before.stages.get(&name).copied().unwrap_or_default();
        (count > count_before).then(|| (name, (sum - sum_before) / (count - count_before)))
    };
    let mut stages: BTreeMap<_, _> = after.stages.into_iter().filter_map(stage).collect();
    Ok(Sample {
        requests,
        per_second: requests / round.took.as_secs_f64(),
        p50_ms: duel::quantile(&round.first, 0.5),
        p99_ms: duel::quantile(&round.first, 0.99),
        cpu_envoy: after.envoy.micros_since(&before.envoy) / requests,
        cpu_server: after.server.micros_since(&before.server) / requests,
        cpu_client: (client - before.client) / 1e3 / requests,
        cpu_engines: after.engines.micros_since(&before.engines) / requests,
        rss_envoy_mib: Memory::of(way.envoy()).now,
        rss_server_mib: memory.now,
        peak_server_mib: memory.peak,
        messages: (after.messages - before.messages) / requests,
        by_prompt: if way.side == Side::Ours {
            by_prompt as f64 / requests
        } else {
            1.0
        },
        prompt_tokens: stages.remove(PROMPT_TOKENS).unwrap_or(0.0),
        stages,
    })
}

/// How many messages Envoy has sent to the server so far.
async fn messages(http: &reqwest::Client, way: &Way) -> anyhow::Result<f64> {
    let url = way
        .stack
        .standalone()
        .admin_url("/stats?filter=stream_msgs_sent&format=json");
    let stats: Value = http.get(url).send().await?.json().await?;
    let stats = stats["stats"].as_array().into_iter().flatten();
    Ok(stats.filter_map(|stat| stat["value"].as_f64()).sum())
}

const STAGES: &str = "warmroute_decision_stage_microseconds";
const PROMPT_TOKENS: &str = "warmroute_prompt_tokens";

/// The sum and the number of warmroute's own times, by stage, and of its prompts' tokens.
async fn stages(http: &reqwest::Client, way: &Way) -> anyhow::Result<BTreeMap<String, (f64, f64)>> {
    let mut stages = BTreeMap::<String, (f64, f64)>::new();
    if way.side != Side::Ours {
        return Ok(stages);
    }
    let page = http
        .get(way.stack.admin_url("/metrics"))
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
        let (name, is_sum) = match (name.strip_suffix("_sum"), name.strip_suffix("_count")) {
            (Some(name), _) => (name, true),
            (_, Some(name)) => (name, false),
            _ => continue,
        };
        let stage = match name {
            STAGES => labels.split('"').nth(1).unwrap_or_default(),
            PROMPT_TOKENS => PROMPT_TOKENS,
            _ => continue,
        };
        let (sum, count) = stages.entry(stage.to_owned()).or_default();
        *if is_sum { sum } else { count } += value.parse::<f64>()?;
    }
    Ok(stages)
}

/// The middle of each number of several rounds.
pub(crate) fn middle(rounds: &[Sample]) -> Sample {
    let of =
        |field: fn(&Sample) -> f64| duel::median(&rounds.iter().map(field).collect::<Vec<_>>());
    let mut stages = BTreeMap::<String, Vec<f64>>::new();
    for (name, micros) in rounds.iter().flat_map(|round| &round.stages) {
        stages.entry(name.clone()).or_default().push(*micros);
    }
    Sample {
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
            .map(|(name, micros)| (name, duel::median(&micros)))
            .collect(),
    }
}
