//! Cost of warmroute without requests: time to readiness, memory, and CPU use with many engines.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use warmroute_testbed::comparison::ComparedMeasure;
use warmroute_testbed::deployment::{LocalDeployment, ModelFiles, ProgramCommands};
use warmroute_testbed::ports::FreePort;

use crate::instant_engines;
use crate::process_usage::{CpuTimes, MemoryUse};
use crate::report::LoadReport;
use crate::setups::{self, SetupSettings};
use crate::sweeps::SweepSettings;

/// Maximum time from the start of the process to readiness, in seconds.
const MAX_READY_SECONDS: f64 = 0.5;
/// Maximum resident memory after the start with one tokenizer of 150,000 words, in MiB.
const MAX_RESIDENT_MIB: f64 = 120.0;
/// Maximum peak of the resident memory, in MiB.
const MAX_PEAK_MIB: f64 = 150.0;
/// Maximum CPU use with a large fleet whose load is not polled, in percent of a core.
const MAX_CPU_PERCENT: f64 = 2.0;

/// Metrics page of the engines, captured from vLLM.
const METRICS_PAGE: &str = "tests/data/engines/metrics-vllm.txt";
/// Minimum number of engines of a large fleet. Its first settings and parity queries take most of
/// the CPU time of the first seconds.
const MIN_LARGE_FLEET: usize = 100;
/// Interval between two readings of the CPU time. It is shorter than the idle time after which a
/// thread ends, so no CPU time is lost.
const READING_INTERVAL: Duration = Duration::from_secs(5);

/// Parameters of one idle measurement.
#[derive(Clone, Copy, Debug)]
struct IdleCase {
    engine_count: usize,
    /// True if warmroute polls the metrics pages of the engines.
    polls_load: bool,
}

/// Results of one idle measurement.
#[derive(Clone, Copy, Debug)]
struct IdleSample {
    ready_seconds: f64,
    /// CPU time of warmroute in percent of a core.
    cpu_percent: f64,
    memory: MemoryUse,
}

/// Measures all cases and adds the results to the report.
pub(crate) async fn run(
    settings: &SweepSettings,
    setup: &SetupSettings,
    dir: &Path,
    report: &mut LoadReport,
) -> anyhow::Result<()> {
    let engine_counts = if settings.is_short {
        &[8][..]
    } else {
        &[8, 1_000]
    };
    for &engine_count in engine_counts {
        for polls_load in [false, true] {
            let case = IdleCase {
                engine_count,
                polls_load,
            };
            let mut samples = Vec::new();
            for round in 0..settings.rounds {
                let dir = dir.join(format!("{engine_count}-{polls_load}-{round}"));
                samples.push(case.measure(settings, setup, &dir).await?);
            }
            case.add_rows(&samples, report);
        }
    }
    Ok(())
}

impl IdleCase {
    /// Starts the engines and warmroute, waits for the first queries of all engines, and measures an
    /// interval.
    async fn measure(
        self,
        settings: &SweepSettings,
        setup: &SetupSettings,
        dir: &Path,
    ) -> anyhow::Result<IdleSample> {
        let first = SocketAddr::from(([127, 0, 0, 1], FreePort::find()?.release()));
        let events_port = FreePort::find()?.release();
        std::fs::create_dir_all(dir)?;
        let engine_args = [
            "--events-port".into(),
            events_port.to_string().into(),
            "--metrics-page".into(),
            warmroute_testbed::repository()
                .join(METRICS_PAGE)
                .into_os_string(),
        ];
        let engines = setups::start_engines(&engine_args, first, self.engine_count, dir).await?;
        let programs = ProgramCommands {
            warmroute: setup.warmroute_command()?,
            engine: Vec::new(),
            model: ModelFiles::Complete,
        };
        let mut deployment = LocalDeployment::start_engines(&programs, &[], dir).await?;
        deployment.write_worker_entries(&self.worker_entries(first, events_port))?;
        let start = Instant::now();
        deployment
            .start_router(&json!({"engines": {"load": {"enabled": self.polls_load}}}))
            .await?;
        let ready_seconds = start.elapsed().as_secs_f64();
        let pid = deployment.router()?.pid();
        let (settle_time, reading_count) = match (settings.is_short, self.is_large()) {
            (true, _) => (Duration::from_secs(1), 1),
            (false, false) => (Duration::from_secs(10), 4),
            (false, true) => (Duration::from_secs(60), 6),
        };
        sleep(settle_time).await;
        let start = Instant::now();
        let mut micros = 0.0;
        let mut before = CpuTimes::read(pid);
        for _ in 0..reading_count {
            sleep(READING_INTERVAL).await;
            let now = CpuTimes::read(pid);
            micros += now.micros_since(&before);
            before = now;
        }
        let sample = IdleSample {
            ready_seconds,
            cpu_percent: micros / 1e4 / start.elapsed().as_secs_f64(),
            memory: MemoryUse::read(pid),
        };
        for process in [deployment.router()?, &engines] {
            ensure!(
                process.is_running(),
                "{} ended during the measurement:\n{}",
                process.name(),
                process.log_tail()
            );
        }
        Ok(sample)
    }

    fn is_large(self) -> bool {
        self.engine_count >= MIN_LARGE_FLEET
    }

    fn worker_entries(self, first: SocketAddr, events_port: u16) -> Value {
        let addresses = instant_engines::addresses(first, self.engine_count);
        (1..)
            .zip(addresses)
            .map(|(id, address): (u64, _)| {
                let events = format!("tcp://{}:{events_port}", address.ip());
                json!({
                    "id": id,
                    "endpoint": address.to_string(),
                    "kv_events": {"endpoint": events, "topic": ""},
                })
            })
            .collect()
    }

    fn add_rows(self, samples: &[IdleSample], report: &mut LoadReport) {
        let polling = if self.polls_load { "on" } else { "off" };
        let name = format!(
            "idle, {} engines, load polling {polling}",
            self.engine_count
        );
        let goal = (!self.polls_load).then_some(1.0);
        let small_fleet_goal = goal.filter(|_| !self.is_large());
        let large_fleet_goal = goal.filter(|_| self.is_large());
        let mut add =
            |measure: &str, unit: &str, bound: f64, goal, value: fn(&IdleSample) -> f64| {
                let values: Vec<f64> = samples.iter().map(value).collect();
                report.table.add(
                    ComparedMeasure::new(&format!("{name}: {measure}"), unit, goal),
                    &[bound],
                    &values,
                );
            };
        add(
            "time to readiness",
            "s",
            MAX_READY_SECONDS,
            small_fleet_goal,
            |sample| sample.ready_seconds,
        );
        add(
            "resident memory",
            "MiB",
            MAX_RESIDENT_MIB,
            small_fleet_goal,
            |sample| sample.memory.resident,
        );
        add(
            "peak memory",
            "MiB",
            MAX_PEAK_MIB,
            small_fleet_goal,
            |sample| sample.memory.peak,
        );
        add(
            "CPU use",
            "% of a core",
            MAX_CPU_PERCENT,
            large_fleet_goal,
            |sample| sample.cpu_percent,
        );
    }
}
