//! Cost of warmroute without requests: time to readiness, memory, and CPU use with many engines.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::comparison::ComparedMeasure;
use warmroute_testbed::deployment::{LocalDeployment, ModelFiles, ProgramCommands};
use warmroute_testbed::ports::FreePort;

use crate::instant_engines;
use crate::process_usage::{CpuTimes, MemoryUse};
use crate::report::LoadReport;
use crate::setups::{self, SetupSettings};
use crate::sweeps::SweepSettings;

/// Maximum time from the start of the process to readiness, in seconds.
const READY_SECONDS: f64 = 0.5;
/// Maximum resident memory after the start with one tokenizer of 150,000 words, in MiB.
const RESIDENT_MIB: f64 = 120.0;
/// Maximum peak of the same memory.
const PEAK_MIB: f64 = 150.0;
/// Maximum CPU use with 1,000 engines that are not polled, in percent of a core.
const CPU_PERCENT: f64 = 2.0;

/// Metrics page of the engines, captured from vLLM.
const METRICS_PAGE: &str = "tests/data/engines/metrics-vllm.txt";
/// Engines from which the first queries of their settings and of their tokens dominate the first
/// seconds.
const MANY_ENGINES: usize = 100;
/// Interval between two readings of the CPU time. A thread of warmroute that ends between two
/// readings is idle for at least this long before.
const READING_INTERVAL: Duration = Duration::from_secs(5);

/// Fleet of one measurement.
#[derive(Clone, Copy, Debug)]
struct IdleCase {
    engines: usize,
    /// True if warmroute reads the load of the engines from their metrics pages.
    polls_load: bool,
}

/// Results of one start.
#[derive(Clone, Copy, Debug)]
struct IdleSample {
    ready_seconds: f64,
    /// CPU time of warmroute in percent of a core.
    cpu_percent: f64,
    memory: MemoryUse,
}

/// Measures all cases and adds their goals to the report.
pub(crate) async fn run(
    settings: &SweepSettings,
    setup: &SetupSettings,
    dir: &Path,
    report: &mut LoadReport,
) -> anyhow::Result<()> {
    let engines = if settings.is_short {
        &[8][..]
    } else {
        &[8, 1_000]
    };
    for engines in engines {
        for polls_load in [false, true] {
            let case = IdleCase {
                engines: *engines,
                polls_load,
            };
            let mut samples = Vec::new();
            for round in 0..settings.rounds {
                let dir = dir.join(format!("{engines}-{polls_load}-{round}"));
                samples.push(case.measure(settings, setup, &dir).await?);
            }
            case.add_rows(&samples, report);
        }
    }
    Ok(())
}

impl IdleCase {
    /// Starts the engines and warmroute. Measures an interval after the first queries of all
    /// engines.
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
        let _engines: ChildProcess =
            setups::start_engines(&engine_args, first, self.engines, dir).await?;
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
        let [settling, readings] = match (settings.is_short, self.engines >= MANY_ENGINES) {
            (true, _) => [1, 1],
            (false, false) => [10, 4],
            (false, true) => [60, 6],
        };
        sleep(Duration::from_secs(settling)).await;
        let start = Instant::now();
        let mut micros = 0.0;
        let mut before = CpuTimes::read(pid);
        for _ in 0..readings {
            sleep(READING_INTERVAL).await;
            let now = CpuTimes::read(pid);
            micros += now.micros_since(&before);
            before = now;
        }
        Ok(IdleSample {
            ready_seconds,
            cpu_percent: micros / 1e4 / start.elapsed().as_secs_f64(),
            memory: MemoryUse::read(pid),
        })
    }

    fn worker_entries(self, first: SocketAddr, events_port: u16) -> Value {
        let addresses = instant_engines::addresses(first, self.engines);
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
        let name = format!("idle, {} engines, load polling {polling}", self.engines);
        let is_small = self.engines < MANY_ENGINES;
        let is_bounded = is_small && !self.polls_load;
        let mut add =
            |measure: &str, unit: &str, bound: f64, goal, value: fn(&IdleSample) -> f64| {
                let values: Vec<f64> = samples.iter().map(value).collect();
                report.table.add(
                    ComparedMeasure::new(&format!("{name}: {measure}"), unit, goal),
                    &[bound],
                    &values,
                );
            };
        let small = is_bounded.then_some(1.0);
        add("ready", "s", READY_SECONDS, small, |sample| {
            sample.ready_seconds
        });
        add("resident memory", "MiB", RESIDENT_MIB, small, |sample| {
            sample.memory.resident
        });
        add("peak memory", "MiB", PEAK_MIB, small, |sample| {
            sample.memory.peak
        });
        let many = (!is_small && !self.polls_load).then_some(1.0);
        add("CPU", "% of a core", CPU_PERCENT, many, |sample| {
            sample.cpu_percent
        });
    }
}
