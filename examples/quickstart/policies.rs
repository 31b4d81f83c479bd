//! Compares Envoy's round robin, the policy `linear` and the default policy on one workload.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use warmroute_server::config::RoutingSection;
use warmroute_server::dispatch::audit::{AuditTotals, table};
use warmroute_server::version::BuildVersion;
use warmroute_testbed::deployment::{EngineSpec, LocalDeployment};
use warmroute_testbed::envoy;
use warmroute_testbed::machine::MachineDescription;
use warmroute_testbed::policy_comparison::{PolicyComparison, PolicyFigures};
use warmroute_testbed::replay::{self, ReplaySummary};
use warmroute_testbed::workload::{CHAT_PRODUCT_BLOCKS, ChatWorkload, WorkloadShape};

use super::output::{FAILED_REQUESTS, list_item};
use super::{ComparisonPlan, MeasuredRun, Quickstart, QuickstartArgs, warm_up_workload};

/// Number of simulated engines.
const ENGINES: u64 = 4;
/// Time to start the processes of one run, on an idle machine.
const START: Duration = Duration::from_secs(3);

/// Output of `--json`.
#[derive(Serialize)]
struct QuickstartReport {
    #[serde(flatten)]
    comparison: PolicyComparison,
    /// Predictions with the default policy, as measured by warmroute, with the causes of misses.
    audit: AuditTotals,
}

/// Run of one policy of warmroute.
struct RoutedRun {
    run: MeasuredRun,
    audit: AuditTotals,
    deployment: LocalDeployment,
}

/// Returns the description and the duration of the comparison.
pub(crate) fn plan(args: &QuickstartArgs) -> anyhow::Result<ComparisonPlan> {
    let workload = workload(args);
    let warm_up = warm_up_workload(args).min_duration();
    Ok(ComparisonPlan {
        text: format!(
            "This program sends the same {} chat requests to {ENGINES} engines three times: through Envoy alone (round robin), \
             and through\nEnvoy with two policies of warmroute (`linear` and `{}`, the default).",
            workload.requests(),
            default_policy()?
        ),
        duration: 3 * (START + warm_up + workload.min_duration()),
    })
}

/// Runs each policy, prints the report and returns the running deployment of the last run.
pub(crate) async fn compare(quickstart: &Quickstart<'_>) -> anyhow::Result<LocalDeployment> {
    let workload = workload(quickstart.args);
    let round_robin = run_round_robin(quickstart, &workload).await?;
    let linear = run_warmroute(quickstart, &workload, Some("linear")).await?;
    // Stops the engines of `linear` before those of the default policy start.
    drop(linear.deployment);
    let default_run = run_warmroute(quickstart, &workload, None).await?;
    let runs = [&round_robin, &linear.run, &default_run.run];
    let errors: Vec<_> = runs
        .iter()
        .flat_map(|run| &run.samples)
        .filter_map(|sample| sample.error.as_ref())
        .collect();
    let [round_robin, linear, default_figures] = runs.map(policy_figures);
    let report = QuickstartReport {
        comparison: PolicyComparison {
            date: jiff::Zoned::now().date().to_string(),
            machine: MachineDescription::read(),
            warmroute_version: BuildVersion::PACKAGE.number.to_owned(),
            envoy_version: quickstart.envoy_version.clone(),
            engines: ENGINES as usize,
            requests: workload.requests(),
            errors: errors.len(),
            default_policy: default_policy()?,
            round_robin,
            linear,
            default_run: default_figures,
            prediction: replay::measure_predictions(&default_run.run.samples),
        },
        audit: default_run.audit,
    };
    let warm_up = warm_up_workload(quickstart.args).requests();
    quickstart.output.write(&report, &report.render(warm_up)?)?;
    if let Some(error) = errors.first() {
        anyhow::bail!("failed requests: {}; first error: {error}", errors.len());
    }
    Ok(default_run.deployment)
}

async fn run_round_robin(
    quickstart: &Quickstart<'_>,
    workload: &ChatWorkload,
) -> anyhow::Result<MeasuredRun> {
    let progress = &quickstart.progress;
    progress.print_step("run 1 of 3, round robin: starting 4 engines and Envoy");
    let dir = quickstart.dir.join("round_robin");
    let mut deployment =
        LocalDeployment::start_engines(&quickstart.programs, &engines(), &dir).await?;
    let addresses: Vec<SocketAddr> = deployment
        .engines
        .iter()
        .map(|engine| engine.address)
        .collect();
    let setup = deployment.envoy_setup();
    envoy::write_endpoints(&setup.endpoint_file(), &addresses)?;
    let config = envoy::round_robin_config(&setup.standalone_config()?)?;
    deployment.start_envoy(&config).await?;
    progress.print_step("round robin: warm-up");
    quickstart.warm_up(&deployment).await?;
    Ok(quickstart
        .measure(&deployment, workload, "round robin")
        .await)
}

/// Runs a policy of warmroute, or its default policy.
async fn run_warmroute(
    quickstart: &Quickstart<'_>,
    workload: &ChatWorkload,
    policy: Option<&'static str>,
) -> anyhow::Result<RoutedRun> {
    let default_policy = default_policy()?;
    let (run, name) = policy.map_or((3, default_policy.as_str()), |policy| (2, policy));
    let progress = &quickstart.progress;
    progress.print_step(&format!(
        "run {run} of 3, {name}: starting 4 engines, warmroute and Envoy"
    ));
    let mut config =
        json!({"gateway": {"response_headers": {"prediction": true}, "observe": "usage"}});
    if let Some(policy) = policy {
        config["routing"] = json!({"policy": policy});
    }
    let dir = quickstart.dir.join(policy.unwrap_or("default"));
    let deployment =
        LocalDeployment::start(&quickstart.programs, &engines(), &dir, &config).await?;
    progress.print_step(&format!("{name}: warm-up"));
    let earlier = quickstart.warm_up(&deployment).await? as u64;
    let before = read_audit(&deployment, earlier).await?;
    let run = quickstart.measure(&deployment, workload, name).await;
    let all = earlier + run.samples.len() as u64;
    let mut audit = read_audit(&deployment, all).await?;
    subtract(&mut audit["models"], &before["models"]);
    Ok(RoutedRun {
        run,
        audit: serde_json::from_value(audit)?,
        deployment,
    })
}

/// Returns warmroute's audit of its predictions, after it has processed every response.
async fn read_audit(deployment: &LocalDeployment, answers: u64) -> anyhow::Result<Value> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let page = deployment.debug_page("audit").await?;
        let totals: AuditTotals = serde_json::from_value(page.clone())?;
        let audited: u64 = totals
            .models
            .values()
            .map(|sums| sums.responses + sums.no_usage + sums.no_cached_tokens)
            .sum();
        // A failed request has no response and is counted as an error.
        if totals.waiting == 0 && audited >= answers || tokio::time::Instant::now() > deadline {
            return Ok(page);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Subtracts the counters of an earlier page, and removes the counters that have not changed.
fn subtract(counters: &mut Value, earlier: &Value) {
    if let Some(count) = counters.as_u64() {
        *counters = json!(count - earlier.as_u64().unwrap_or(0).min(count));
    } else if let Some(counters) = counters.as_object_mut() {
        for (key, counter) in counters.iter_mut() {
            subtract(counter, &earlier[key]);
        }
        counters.retain(|_, counter| *counter != 0);
    }
}

fn policy_figures(run: &MeasuredRun) -> PolicyFigures {
    let mut clients = replay::summarize(&run.samples);
    for id in 1..=ENGINES {
        let counts = &mut clients.requests_per_worker;
        counts.entry(id.to_string()).or_default();
    }
    PolicyFigures {
        clients,
        cpu: run.cpu,
    }
}

fn engines() -> Vec<EngineSpec> {
    let blocks = CHAT_PRODUCT_BLOCKS.to_string();
    let engine = |id| EngineSpec::new(id).with(&["--num-blocks", &blocks]);
    (1..=ENGINES).map(engine).collect()
}

/// Returns the name of the policy of models that do not configure one.
fn default_policy() -> anyhow::Result<String> {
    let policy = RoutingSection::default().default_policy();
    Ok(serde_json::from_value(serde_json::to_value(policy)?)?)
}

fn workload(args: &QuickstartArgs) -> ChatWorkload {
    let shape = WorkloadShape::chat_product();
    let shape = WorkloadShape {
        groups: args.groups.unwrap_or(shape.groups),
        sessions_per_group: args.sessions,
        ..shape
    };
    ChatWorkload::new(args.seed, &shape)
}

impl QuickstartReport {
    /// Renders the table, its description, and the audit. `warm_up` is the number of requests before
    /// each run.
    fn render(&self, warm_up: usize) -> anyhow::Result<String> {
        let comparison = &self.comparison;
        let policy = &comparison.default_policy;
        let mut text = format!(
            "\nwarmroute {}, Envoy {}; {}; {}\n{} simulated engines, {} requests in each run, {} errors\n\n",
            comparison.warmroute_version,
            comparison.envoy_version,
            comparison.machine,
            comparison.date,
            comparison.engines,
            comparison.requests,
            comparison.errors
        );
        for [name, round_robin, linear, default_run] in self.rows() {
            writeln!(
                text,
                "{name:<28}{round_robin:>16}{linear:>16}{default_run:>16}"
            )?;
        }
        writeln!(
            text,
            "\n`{policy}` is the default policy of warmroute; `linear` has fixed weights, like the router of Dynamo.\n\
             Before each run, {warm_up} other requests opened the connections, warmed up the tokenizers and calibrated the latency model.\n\
             Then the KV caches of all engines were emptied.\n\n\
             Findings:"
        )?;
        let prediction = &comparison.prediction;
        let prediction = format!(
            "warmroute predicted the cached tokens of {} of {} requests exactly; the mean error is {:.2} tokens.",
            prediction.exact, prediction.requests, prediction.mean_abs_error_tokens
        );
        let findings = if comparison.errors == 0 {
            [comparison.findings(), vec![prediction]].concat()
        } else {
            vec![FAILED_REQUESTS.to_owned()]
        };
        for finding in findings {
            text += &list_item(&finding);
        }
        writeln!(
            text,
            "\nThe audit of warmroute (`warmroute audit`) shows the causes of missed tokens:\n\n{}\
             Next: docs/getting-started.md sets up warmroute in front of your own vLLM.\n\
             With --keep, all processes of the last run keep running.",
            table::render(&self.audit, None)
        )?;
        Ok(text)
    }

    /// Returns the rows of the table. Columns: name, round robin, `linear`, default policy.
    fn rows(&self) -> Vec<[String; 4]> {
        let comparison = &self.comparison;
        let row = |name: &str, cell: &dyn Fn(&ReplaySummary) -> String| {
            [
                name.to_owned(),
                cell(&comparison.round_robin.clients),
                cell(&comparison.linear.clients),
                cell(&comparison.default_run.clients),
            ]
        };
        let ms = |name: &str, figure: fn(&ReplaySummary) -> f64| {
            row(name, &|clients| format!("{:.0} ms", figure(clients)))
        };
        let balance = |clients: &ReplaySummary| {
            let counts = clients.requests_per_worker.values();
            let counts: Vec<String> = counts.map(ToString::to_string).collect();
            counts.join("/")
        };
        let header = |cells: [&str; 4]| cells.map(str::to_owned);
        vec![
            header(["", "Envoy alone", "warmroute", "warmroute"]),
            header(["", "round robin", "linear", &comparison.default_policy]),
            row("prefix hit rate", &|clients| {
                format!("{:.1} %", clients.hit_rate * 100.0)
            }),
            ms("time to first token mean", |clients| clients.ttft_ms.mean),
            ms("                    p50", |clients| clients.ttft_ms.p50),
            ms("                    p95", |clients| clients.ttft_ms.p95),
            ms("                    p99", |clients| clients.ttft_ms.p99),
            row("time per further token mean", &|clients| {
                format!("{:.1} ms", clients.token_ms.mean)
            }),
            ms("time to last token mean", |clients| clients.e2e_ms.mean),
            row("requests per worker", &balance),
        ]
    }
}
