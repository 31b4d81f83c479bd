//! The main use case in one command: four simulated engines, a real Envoy, and a multi-turn chat
//! workload with real tokens. The workload is balanced by Envoy's round robin alone, then routed by
//! warmroute with the policy `linear`, and then with the default policy. The program prints the
//! figures that a user observes.
//!
//! The engines and warmroute run as separate processes: this program starts itself again with
//! another first argument. Only Cargo and Python are needed.

mod disaggregated;
mod progress;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use serde::Serialize;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use warmroute_server::app::NoExternalDiscovery;
use warmroute_server::config::RoutingSection;
use warmroute_server::dispatch::audit::{AuditTotals, table};
use warmroute_server::serve::{self, ServeArgs};
use warmroute_server::version::BuildVersion;
use warmroute_testbed::deployment::{
    EngineSpec, LocalDeployment, MODEL, ModelFiles, ProgramCommands,
};
use warmroute_testbed::envoy;
use warmroute_testbed::replay::{self, PredictionAccuracy, ReplaySummary, RequestSample};
use warmroute_testbed::signals::run_until_signal;
use warmroute_testbed::workload::{CHAT_PRODUCT_BLOCKS, ChatWorkload, WorkloadShape};

use progress::ProgressDisplay;

/// Instance ids of the engines. The last one shows that an id may be any u64.
const ENGINES: [u64; 4] = [1, 2, 3, u64::MAX];

/// Compares Envoy's round robin with two policies of warmroute on one workload.
#[derive(Debug, Parser)]
struct QuickstartArgs {
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// Leave everything running afterwards and print a request to try; end with Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Groups of users; each shares a system prompt [default: 60, or 16 with --disaggregated]
    #[arg(long)]
    groups: Option<usize>,
    /// Conversations in each group
    #[arg(long, default_value_t = 1)]
    sessions: usize,
    /// Seed of the workload
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Compare four engines for both phases with two prefill and two decode engines, on long
    /// prompts
    #[arg(long, value_enum)]
    disaggregated: Option<disaggregated::PrefillProtocol>,
    /// Runs of each side of --disaggregated, in alternating order
    #[arg(long, default_value_t = 2, requires = "disaggregated", value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
    /// Answers of 400 to 1,200 tokens for --disaggregated instead of 800 each
    #[arg(long, requires = "disaggregated")]
    uneven: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct QuickstartReport {
    envoy_version: String,
    /// Number of requests of each of the three runs.
    requests: usize,
    /// Number of errors of all runs.
    errors: usize,
    /// Default policy of warmroute.
    default_policy: String,
    /// Envoy alone.
    round_robin: ReplaySummary,
    /// warmroute with the policy `linear`.
    linear: ReplaySummary,
    /// warmroute with its default policy.
    #[serde(rename = "default")]
    default_run: ReplaySummary,
    /// Predictions with the default policy, as measured by the clients.
    prediction: PredictionAccuracy,
    /// Predictions with the default policy, as measured by warmroute, with the causes of misses.
    audit: AuditTotals,
}

fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let own = args.next();
    let first = args.next();
    let rest = own.into_iter().chain(args);
    match first.as_ref().and_then(|first| first.to_str()) {
        Some(AS_ENGINE) => exit_code(run_engine(rest)),
        Some(AS_WARMROUTE) => exit_code(run_warmroute(rest)),
        _ => exit_code(quickstart(&QuickstartArgs::parse())),
    }
}

const AS_ENGINE: &str = "as-engine";
const AS_WARMROUTE: &str = "as-warmroute";

#[expect(
    clippy::print_stderr,
    reason = "a program prints its error on standard error"
)]
fn exit_code(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("quickstart: {error:#}");
        ExitCode::FAILURE
    })
}

#[derive(Debug, Parser)]
struct EngineArgs {
    #[command(flatten)]
    engine: warmroute_engine_sim::EngineConfig,
    #[arg(long)]
    listen: SocketAddr,
}

#[tokio::main]
async fn run_engine(args: impl Iterator<Item = OsString>) -> anyhow::Result<ExitCode> {
    let args = EngineArgs::parse_from(args);
    let listener = tokio::net::TcpListener::bind(args.listen).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        result = warmroute_engine_sim::run(args.engine, listener) => result?,
        _ = terminate.recv() => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Arguments of the server process.
#[derive(Debug, Parser)]
struct ServerArgs {
    #[command(subcommand)]
    command: ServerCommand,
}

#[derive(Debug, clap::Subcommand)]
enum ServerCommand {
    /// Serves until SIGTERM or SIGINT
    Serve(ServeArgs),
}

fn run_warmroute(args: impl Iterator<Item = OsString>) -> anyhow::Result<ExitCode> {
    let ServerCommand::Serve(args) = ServerArgs::parse_from(args).command;
    let code = serve::run(
        &args,
        &BuildVersion::PACKAGE,
        Arc::new(NoExternalDiscovery),
        &mut io::stderr(),
    )?;
    Ok(ExitCode::from(code))
}

fn quickstart(args: &QuickstartArgs) -> anyhow::Result<ExitCode> {
    match run_until_signal(run(args)) {
        Err(error) if is_broken_pipe(&error) => Ok(ExitCode::from(141)),
        result => result,
    }
}

/// Returns true if the reader of standard output has exited, as after `| head -1`. This error is not
/// reported.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

async fn run(args: &QuickstartArgs) -> anyhow::Result<()> {
    let progress = ProgressDisplay::new(args.json);
    progress.set_message("looking for Envoy");
    let binary = tokio::task::spawn_blocking(envoy::binary).await??;
    let dir = tempfile::Builder::new().prefix("warmroute-").tempdir()?;
    let own = std::env::current_exe()?.into_os_string();
    let quickstart = Quickstart {
        args,
        programs: ProgramCommands {
            warmroute: vec![own.clone(), AS_WARMROUTE.into()],
            engine: vec![own, AS_ENGINE.into()],
            model: ModelFiles::Complete,
        },
        envoy_version: envoy::version(&binary)?,
        dir: dir.path().to_owned(),
        progress,
    };
    let result = match args.disaggregated {
        Some(protocol) => quickstart.compare_disaggregated(protocol).await,
        None => quickstart.compare_policies().await,
    };
    let deployment = match result {
        Ok(deployment) => deployment,
        Err(error) if is_broken_pipe(&error) => return Err(error),
        Err(error) => anyhow::bail!("{error:#}\nThe logs are in {}", dir.keep().display()),
    };
    if args.keep {
        print_request(args, &deployment)?;
        std::future::pending::<()>().await;
    }
    Ok(())
}

/// Programs and options of one run.
struct Quickstart<'a> {
    args: &'a QuickstartArgs,
    programs: ProgramCommands,
    envoy_version: String,
    dir: PathBuf,
    progress: ProgressDisplay,
}

impl Quickstart<'_> {
    /// Compares both layouts of the phases, prints the report and returns the running deployment.
    async fn compare_disaggregated(
        &self,
        protocol: disaggregated::PrefillProtocol,
    ) -> anyhow::Result<LocalDeployment> {
        let (report, deployment) = disaggregated::compare(protocol, self).await?;
        report.print(self.args.json)?;
        report
            .flaw()
            .map_or(Ok(deployment), |flaw| Err(anyhow::anyhow!(flaw)))
    }

    /// Compares Envoy's round robin, `linear` and the default policy, prints the report and returns
    /// the running deployment of the last run. Each run starts with cold engines.
    async fn compare_policies(&self) -> anyhow::Result<LocalDeployment> {
        let workload = ChatWorkload::new(self.args.seed, &workload_shape(self.args));
        let round_robin = self.run_round_robin(&workload).await?;
        let (linear, deployment) = self.run_warmroute(&workload, Some("linear")).await?;
        // Stops the engines of `linear` before those of the default policy start.
        drop(deployment);
        let (default_run, deployment) = self.run_warmroute(&workload, None).await?;
        self.progress.set_message("reading the audit");
        let audit = read_audit(&deployment, default_run.len() as u64).await?;
        self.progress.set_message("done");
        let samples = || round_robin.iter().chain(&linear).chain(&default_run);
        let errors: Vec<_> = samples()
            .filter_map(|sample| sample.error.as_ref())
            .collect();
        let report = QuickstartReport {
            envoy_version: self.envoy_version.clone(),
            requests: default_run.len(),
            errors: errors.len(),
            default_policy: default_policy()?,
            round_robin: replay::summarize(&round_robin),
            linear: replay::summarize(&linear),
            default_run: replay::summarize(&default_run),
            prediction: replay::measure_predictions(&default_run),
            audit,
        };
        report.print(self.args.json)?;
        if let Some(error) = errors.first() {
            anyhow::bail!("{} requests failed, the first with: {error}", errors.len());
        }
        Ok(deployment)
    }

    fn engines(&self) -> Vec<EngineSpec> {
        let blocks = CHAT_PRODUCT_BLOCKS.to_string();
        let engine = |id| EngineSpec::new(id).with(&["--num-blocks", &blocks]);
        ENGINES.into_iter().map(engine).collect()
    }

    async fn run_round_robin(&self, workload: &ChatWorkload) -> anyhow::Result<Vec<RequestSample>> {
        self.progress.set_message("starting 4 engines and Envoy");
        let dir = self.dir.join("round_robin");
        let mut deployment =
            LocalDeployment::start_engines(&self.programs, &self.engines(), &dir).await?;
        let addresses: Vec<SocketAddr> = deployment
            .engines
            .iter()
            .map(|engine| engine.address)
            .collect();
        let setup = deployment.envoy_setup();
        envoy::write_endpoints(&setup.endpoint_file(), &addresses)?;
        let config = envoy::round_robin_config(&setup.standalone_config()?)?;
        deployment.start_envoy(&config).await?;
        Ok(self.replay(&deployment, workload, "round robin").await)
    }

    /// Replays the workload with a policy of warmroute, or with its default policy.
    async fn run_warmroute(
        &self,
        workload: &ChatWorkload,
        policy: Option<&'static str>,
    ) -> anyhow::Result<(Vec<RequestSample>, LocalDeployment)> {
        self.progress
            .set_message("starting 4 engines, warmroute and Envoy");
        let mut config =
            json!({"gateway": {"response_headers": {"prediction": true}, "observe": "usage"}});
        if let Some(policy) = policy {
            config["routing"] = json!({"policy": policy});
        }
        let name = policy.unwrap_or("default");
        let dir = self.dir.join(name);
        let deployment =
            LocalDeployment::start(&self.programs, &self.engines(), &dir, &config).await?;
        let samples = self.replay(&deployment, workload, name).await;
        Ok((samples, deployment))
    }

    /// Replays the workload through a deployment with a progress bar.
    async fn replay(
        &self,
        deployment: &LocalDeployment,
        workload: &ChatWorkload,
        name: &'static str,
    ) -> Vec<RequestSample> {
        let requests = workload
            .sessions
            .iter()
            .map(|session| session.turns.len())
            .sum();
        let bar = self.progress.request_bar(name, requests);
        let step = bar.clone();
        let url = deployment.url("/v1/chat/completions");
        let samples = replay::run(url, workload.clone(), move |_| step.inc(1)).await;
        bar.finish_and_clear();
        samples
    }
}

/// Returns warmroute's audit of its predictions, after it has processed every response.
async fn read_audit(deployment: &LocalDeployment, answers: u64) -> anyhow::Result<AuditTotals> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let totals: AuditTotals = serde_json::from_value(deployment.debug_page("audit").await?)?;
        let audited: u64 = totals
            .models
            .values()
            .map(|sums| sums.responses + sums.no_usage + sums.no_cached_tokens)
            .sum();
        // A failed request has no response and is counted as an error.
        if totals.waiting == 0 && audited >= answers || tokio::time::Instant::now() > deadline {
            return Ok(totals);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the name of the policy of models that do not configure one.
fn default_policy() -> anyhow::Result<String> {
    let policy = RoutingSection::default().default_policy();
    Ok(serde_json::from_value(serde_json::to_value(policy)?)?)
}

fn workload_shape(args: &QuickstartArgs) -> WorkloadShape {
    let shape = WorkloadShape::chat_product();
    WorkloadShape {
        groups: args.groups.unwrap_or(shape.groups),
        sessions_per_group: args.sessions,
        ..shape
    }
}

impl QuickstartReport {
    /// Prints the report. Returns an error if the output is closed; the print macros would panic.
    fn print(&self, as_json: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if as_json {
            return writeln!(out, "{}", serde_json::to_string(self)?);
        }
        writeln!(
            out,
            "Envoy {}, {} requests each, {} errors\n",
            self.envoy_version, self.requests, self.errors
        )?;
        for [name, cells @ ..] in self.rows() {
            let [round_robin, linear, default_run] = cells;
            writeln!(
                out,
                "{name:<28}{round_robin:>16}{linear:>16}{default_run:>16}"
            )?;
        }
        writeln!(
            out,
            "\nRound robin is Envoy's own. `linear` and `{0}` are policies of warmroute; `{0}` is the default.",
            self.default_policy
        )?;
        let prediction = &self.prediction;
        let share = match prediction.requests {
            0 => 0.0,
            requests => prediction.exact as f64 / requests as f64 * 100.0,
        };
        writeln!(
            out,
            "Cached tokens with `{}`: predicted exactly for {} of {} requests ({share:.1} %),",
            self.default_policy, prediction.exact, prediction.requests
        )?;
        writeln!(
            out,
            "mean error {:.2} tokens; as warmroute itself accounts for it (`warmroute audit`):\n",
            prediction.mean_abs_error_tokens
        )?;
        write!(out, "{}", table::render(&self.audit, None))
    }

    /// Returns the rows of the table: name, round robin, linear, default policy.
    fn rows(&self) -> Vec<[String; 4]> {
        let row = |name: &str, cell: &dyn Fn(&ReplaySummary) -> String| {
            [
                name.to_owned(),
                cell(&self.round_robin),
                cell(&self.linear),
                cell(&self.default_run),
            ]
        };
        let percent = |summary: &ReplaySummary| format!("{:.1} %", summary.hit_rate * 100.0);
        let balance = |summary: &ReplaySummary| {
            let counts: Vec<String> = summary
                .requests_per_worker
                .values()
                .map(ToString::to_string)
                .collect();
            counts.join("/")
        };
        let ms = |value: f64| format!("{value:.0} ms");
        vec![
            [
                "".into(),
                "round robin".into(),
                "linear".into(),
                self.default_policy.clone(),
            ],
            row("prefix hit rate", &percent),
            row("time to first token mean", &|summary| {
                ms(summary.ttft_ms.mean)
            }),
            row("                    p50", &|summary| {
                ms(summary.ttft_ms.p50)
            }),
            row("                    p95", &|summary| {
                ms(summary.ttft_ms.p95)
            }),
            row("                    p99", &|summary| {
                ms(summary.ttft_ms.p99)
            }),
            row("time to the last token mean", &|summary| {
                ms(summary.e2e_ms.mean)
            }),
            row("requests per worker", &balance),
        ]
    }
}

/// Prints a request to try. It is printed on standard error if standard output is machine-readable.
fn print_request(args: &QuickstartArgs, deployment: &LocalDeployment) -> io::Result<()> {
    let mut out: Box<dyn io::Write> = if args.json {
        Box::new(io::stderr())
    } else {
        Box::new(io::stdout())
    };
    let body =
        json!({"model": MODEL, "stream": true, "messages": [{"role": "user", "content": "hello"}]});
    let chat = deployment.url("/v1/chat/completions");
    writeln!(out, "\nEverything is running; Ctrl-C ends it. Try:")?;
    writeln!(
        out,
        "  curl -iN {chat} -H 'content-type: application/json' -d '{body}'"
    )?;
    writeln!(out, "  curl {}", deployment.admin_url("/metrics"))?;
    writeln!(out, "  curl {}", deployment.admin_url("/debug/load"))?;
    writeln!(
        out,
        "The configuration and the logs are in {}",
        deployment.run_dir.display()
    )
}
