//! Metrics of the operating system about this process, named as in the Prometheus client libraries.

use std::fmt;

use procfs::process::{LimitValue, Process};
use procfs::{ProcResult, WithCurrentSystemInfo as _};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

/// Reads the state of the process at each scrape.
#[derive(Debug)]
pub(crate) struct ProcessCollector {
    /// Unix time at which the process started.
    start_seconds: Option<f64>,
}

/// State of the process at one scrape.
struct ProcessState {
    cpu_seconds: f64,
    resident_bytes: u64,
    virtual_bytes: u64,
    threads: i64,
    open_fds: usize,
    max_fds: Option<u64>,
}

/// Name without the prefix `process_`, and help text.
pub(crate) const CPU: (&str, &str) = ("cpu_seconds", "CPU time in user and system mode");
pub(crate) const GAUGES: [(&str, &str); 6] = [
    ("resident_memory_bytes", "Resident memory"),
    ("virtual_memory_bytes", "Virtual memory"),
    ("threads", "Threads of the operating system"),
    ("open_fds", "Open file descriptors"),
    (
        "max_fds",
        "Maximum number of open file descriptors; absent without a limit",
    ),
    (
        "start_time_seconds",
        "Unix time at which the process started",
    ),
];

impl ProcessCollector {
    /// Adds the metrics to a registry without a prefix.
    pub(crate) fn register(registry: &mut Registry) {
        let collector = Self {
            start_seconds: start_seconds().ok(),
        };
        registry
            .sub_registry_with_prefix("process")
            .register_collector(Box::new(collector));
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        // If /proc cannot be read, the page has no process metrics.
        let Ok(state) = ProcessState::read() else {
            return Ok(());
        };
        let (name, help) = CPU;
        let cpu = ConstCounter::new(state.cpu_seconds);
        cpu.encode(encoder.encode_descriptor(name, help, None, cpu.metric_type())?)?;
        let values = [
            Some(state.resident_bytes as f64),
            Some(state.virtual_bytes as f64),
            Some(state.threads as f64),
            Some(state.open_fds as f64),
            state.max_fds.map(|fds| fds as f64),
            self.start_seconds,
        ];
        for ((name, help), value) in GAUGES.into_iter().zip(values) {
            let Some(value) = value else { continue };
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

impl ProcessState {
    fn read() -> ProcResult<Self> {
        let process = Process::myself()?;
        let stat = process.stat()?;
        let max_fds = match process.limits()?.max_open_files.soft_limit {
            LimitValue::Value(fds) => Some(fds),
            LimitValue::Unlimited => None,
        };
        Ok(Self {
            cpu_seconds: to_seconds(stat.utime + stat.stime),
            resident_bytes: stat.rss_bytes().get(),
            virtual_bytes: stat.vsize,
            threads: stat.num_threads,
            open_fds: process.fd_count()?,
            max_fds,
        })
    }
}

fn start_seconds() -> ProcResult<f64> {
    let since_boot = to_seconds(Process::myself()?.stat()?.starttime);
    Ok(procfs::boot_time_secs()? as f64 + since_boot)
}

fn to_seconds(ticks: u64) -> f64 {
    ticks as f64 / procfs::ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use crate::{Metrics, TextFormat};

    #[test]
    fn page_has_process_metrics() {
        let page = Metrics::new()
            .render(TextFormat::Prometheus, |_| {})
            .unwrap();
        let value = |name: &str| -> f64 {
            let line = page
                .lines()
                .find_map(|line| line.strip_prefix(&format!("process_{name} ")));
            line.unwrap_or_else(|| panic!("no {name} in {page}"))
                .parse()
                .unwrap()
        };
        assert!(value("cpu_seconds_total") >= 0.0);
        assert!(value("resident_memory_bytes") > 1e5, "{page}");
        assert!(value("virtual_memory_bytes") > value("resident_memory_bytes"));
        assert!(value("open_fds") >= 3.0 && value("open_fds") < value("max_fds"));
        assert!(value("threads") >= 1.0);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs_f64();
        let age = now - value("start_time_seconds");
        assert!((-2.0..86_400.0).contains(&age), "{age}");
        assert!(page.contains("# TYPE process_cpu_seconds_total counter\n"));
    }
}
