//! Prefill and decode on the same engines against the two apart, on conversations with long prompts and long answers, as
//! agents have them.

use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use serde::Serialize;
use serde_json::{Value, json};

use super::support::ports::FreePort;
use super::support::replay::{self, Figures, Sample};
use super::support::stack::{BLOCK_SIZE, EngineSpec, MODEL, Programs, Stack, model_file};
use super::support::workload::{Shape, Workload};

/// How prefills are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum By {
    /// Envoy sends both workers the request (SGLang)
    Mirror,
    /// warmroute asks the prefill worker first (vLLM)
    Call,
}

impl By {
    fn name(self) -> &'static str {
        match self {
            By::Mirror => "mirror",
            By::Call => "call",
        }
    }

    /// What an engine of a role is started with, and how it is listed.
    fn engine(self, role: &str, id: u64) -> anyhow::Result<EngineSpec> {
        let engine = engine(id);
        Ok(match (self, role) {
            (By::Call, _) => engine.with(&["--kv-connector", "nixl"]).listed(json!({"role": role})),
            (By::Mirror, "prefill") => {
                let port = FreePort::find()?.release();
                let meets = ["--disaggregation-mode", "prefill", "--bootstrap-port", &port.to_string()];
                engine.with(&meets).listed(json!({"role": role, "bootstrap": {"port": port}}))
            }
            (By::Mirror, _) => engine.with(&["--disaggregation-mode", "decode"]).listed(json!({"role": role})),
        })
    }
}

/// 320,000 tokens of cache; a transfer of a block takes what 2 MB take over 200 Gbit/s.
fn engine(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--num-blocks", "20000", "--transfer-us-per-block", "80"])
}

/// Both runs.
#[derive(Serialize)]
pub(crate) struct Compared {
    by: &'static str,
    requests: usize,
    aggregated: Figures,
    disaggregated: Figures,
    /// Requests whose prefill was another worker's.
    remote_prefills: u64,
}

/// Sixteen conversations of three long turns each.
fn workload(seed: u64) -> Workload {
    let shape = Shape {
        groups: 16,
        sessions_per_group: 1,
        turns: 3..=3,
        system_words: 100..=100,
        user_words: 3500..=4500,
        max_tokens: 800..=800,
        think: Duration::ZERO..=Duration::ZERO,
        sessions_per_second: 8.0,
    };
    Workload::new(seed, &shape)
}

/// Replays the same workload against four engines that do both phases, and against two and two.
pub(crate) async fn compare(by: By, seed: u64, programs: &Programs, dir: &Path) -> anyhow::Result<Compared> {
    let workload = workload(seed);
    let together: Vec<EngineSpec> = (1..=4).map(engine).collect();
    let stack = Stack::start(programs, &together, &dir.join("aggregated"), &json!({})).await?;
    let aggregated = replay(&stack, &workload).await?;
    drop(stack);

    let roles = [("prefill", 1), ("prefill", 2), ("decode", 3), ("decode", 4)];
    let apart = roles.into_iter().map(|(role, id)| by.engine(role, id)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut stack = Stack::engines(programs, &apart, &dir.join(by.name())).await?;
    stack.write_workers()?;
    stack.start_router(&configuration(by)).await?;
    let envoy = stack.standalone().config_of(&format!("disaggregated-{}", by.name()), &[])?;
    stack.start_envoy(&envoy).await?;
    let disaggregated = replay(&stack, &workload).await?;
    let remote_prefills = disaggregated.iter().filter(|sample| sample.prefilled_by.is_some()).count() as u64;
    ensure!(remote_prefills as usize == disaggregated.len(), "only {remote_prefills} prefills were another worker's");
    Ok(Compared {
        by: by.name(),
        requests: disaggregated.len(),
        aggregated: replay::figures(&aggregated),
        disaggregated: replay::figures(&disaggregated),
        remote_prefills,
    })
}

fn configuration(by: By) -> Value {
    json!({
        "response": {"worker_header": true},
        "models": [{
            "name": MODEL,
            "tokenizer": model_file("tokenizer.json.gz"),
            "tokenizer_config": model_file("tokenizer_config.json"),
            "block_size": BLOCK_SIZE,
            "prefill": {"by": by.name()},
        }],
    })
}

async fn replay(stack: &Stack, workload: &Workload) -> anyhow::Result<Vec<Sample>> {
    let samples = replay::run(stack.url("/v1/chat/completions"), workload.clone(), |_| {}).await;
    let failed: Vec<&str> = samples.iter().filter_map(|sample| sample.error.as_deref()).collect();
    ensure!(failed.is_empty(), "{} of {} requests failed, the first with: {}", failed.len(), samples.len(), failed[0]);
    Ok(samples)
}

impl Compared {
    /// Prints it.
    pub(crate) fn show(&self, as_json: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if as_json {
            return writeln!(out, "{}", serde_json::to_string(self)?);
        }
        let (left, right) = (&self.aggregated, &self.disaggregated);
        writeln!(
            out,
            "{} requests each, {} prefills by another worker ({})\n",
            self.requests, self.remote_prefills, self.by
        )?;
        writeln!(out, "{:<28}{:>16}{:>16}", "", "4 aggregated", "2 + 2")?;
        for (name, at) in [
            ("time to first token p50", (|figures| figures.ttft_ms.p50) as fn(&Figures) -> f64),
            ("                    p95", |figures| figures.ttft_ms.p95),
            ("                    p99", |figures| figures.ttft_ms.p99),
        ] {
            let ms = |figures: &Figures| format!("{:.0} ms", at(figures));
            writeln!(out, "{name:<28}{:>16}{:>16}", ms(left), ms(right))?;
        }
        Ok(())
    }
}
