//! Description and CPU usage of the machine of a measurement.

use std::fmt;
use std::fs;

use serde::{Deserialize, Serialize};

/// Nanoseconds of a clock tick in `/proc`, which is a hundredth of a second on Linux.
const NANOS_PER_TICK: u64 = 10_000_000;
/// Highest `waited` of a run without a warning.
const MAX_WAIT_RATIO: f64 = 1.0;
/// Highest share of stolen CPU time of a run without a warning.
const MAX_STOLEN_SHARE: f64 = 0.05;
/// Share of CPU time above which other processes count as the cause of the waiting.
const MAX_OTHER_SHARE: f64 = 0.1;

/// Description of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineDescription {
    /// Model name of the CPU.
    pub cpu: String,
    /// Number of cores that the process may use.
    pub cores: usize,
    /// Memory in GiB, rounded down.
    pub memory_gib: u64,
}

impl MachineDescription {
    /// Describes this machine. An unknown CPU is `unknown CPU`, and unknown memory is 0.
    pub fn read() -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpu
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kibibytes = memory.lines().find_map(|line| {
            let size = line.strip_prefix("MemTotal:")?.trim();
            size.strip_suffix(" kB")?.parse::<u64>().ok()
        });
        Self {
            cpu: model.map_or("unknown CPU", |(_, name)| name).to_owned(),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_gib: kibibytes.unwrap_or_default() >> 20,
        }
    }
}

impl fmt::Display for MachineDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.cores == 1 { "" } else { "s" };
        write!(f, "{}, {} core{plural}", self.cpu, self.cores)?;
        match self.memory_gib {
            0 => Ok(()),
            memory => write!(f, ", {memory} GiB"),
        }
    }
}

/// CPU time of the machine and of some processes since their start, in clock ticks.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuReading {
    total: u64,
    idle: u64,
    stolen: u64,
    processes: u64,
    /// Nanoseconds for which threads of the processes waited for a CPU.
    waited_nanos: u64,
}

/// Shares of the CPU time of all cores between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuUsage {
    /// Share that processes used or that was stolen.
    pub busy: f64,
    /// Share that processes other than the measured ones used.
    pub other_processes: f64,
    /// Share that the hypervisor assigned to other virtual machines.
    pub stolen: f64,
    /// Time for which the measured processes waited for a CPU, relative to the time for which they
    /// ran.
    pub waited: f64,
}

impl CpuReading {
    /// Reads the CPU time of the machine and of the processes; zeros without `/proc`.
    pub fn read(processes: &[u32]) -> Self {
        let machine = fs::read_to_string("/proc/stat").unwrap_or_default();
        let process = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            process_ticks(&stat)
        };
        Self {
            processes: processes.iter().filter_map(process).sum(),
            waited_nanos: processes.iter().map(waited_nanos).sum(),
            ..machine_ticks(&machine).unwrap_or_default()
        }
    }

    /// Returns the usage since an earlier reading of the same processes.
    pub fn usage_since(&self, earlier: &Self) -> CpuUsage {
        let ticks = |counter: fn(&Self) -> u64| counter(self).saturating_sub(counter(earlier));
        let total = ticks(|reading| reading.total);
        let share = |ticks: u64| ticks as f64 / total.max(1) as f64;
        let busy = total.saturating_sub(ticks(|reading| reading.idle));
        let stolen = ticks(|reading| reading.stolen);
        let own = ticks(|reading| reading.processes);
        let waited = ticks(|reading| reading.waited_nanos);
        CpuUsage {
            busy: share(busy),
            other_processes: share(busy.saturating_sub(stolen).saturating_sub(own)),
            stolen: share(stolen),
            waited: waited as f64 / (own.max(1) * NANOS_PER_TICK) as f64,
        }
    }
}

/// Returns a warning if the machine was too busy during a run of a comparison.
pub fn overload_warning(runs: &[CpuUsage]) -> Option<String> {
    let highest = |figure: fn(&CpuUsage) -> f64| runs.iter().map(figure).fold(0.0, f64::max);
    let percents = |figure: fn(&CpuUsage) -> f64| {
        let percents = runs
            .iter()
            .map(|run| format!("{:.0} %", figure(run) * 100.0));
        percents.collect::<Vec<_>>().join(", ")
    };
    let (cause, fix) = if highest(|run| run.stolen) > MAX_STOLEN_SHARE {
        let stolen = percents(|run| run.stolen);
        (
            format!("other virtual machines took {stolen} of the CPU time in the runs"),
            "repeat the comparison on an idle host",
        )
    } else if highest(|run| run.waited) <= MAX_WAIT_RATIO {
        return None;
    } else if highest(|run| run.other_processes) > MAX_OTHER_SHARE {
        let others = percents(|run| run.other_processes);
        (
            format!("other processes used {others} of the CPU time in the runs"),
            "repeat the comparison on an idle machine",
        )
    } else {
        let busy = percents(|run| run.busy);
        (
            format!("the CPU was busy for {busy} of the time in the runs"),
            "use a machine with more cores",
        )
    };
    Some(format!(
        "WARNING: {cause}. The times include waiting for the CPU; {fix}."
    ))
}

/// Parses the first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal.
fn machine_ticks(stat: &str) -> Option<CpuReading> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line
        .split_whitespace()
        .take(8)
        .map_while(|ticks| ticks.parse().ok())
        .collect();
    let [_, _, _, idle, waiting, _, _, stolen] = ticks[..] else {
        return None;
    };
    Some(CpuReading {
        total: ticks.iter().sum(),
        idle: idle + waiting,
        stolen,
        ..CpuReading::default()
    })
}

/// Returns the time for which the current threads of a process have waited for a CPU.
fn waited_nanos(pid: &u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let waited = |thread: fs::DirEntry| {
        let stat = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        stat.split(' ').nth(1)?.parse::<u64>().ok()
    };
    threads
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(waited)
        .sum()
}

/// Parses user and system time, which are fields 14 and 15 of `/proc/PID/stat`. The second field,
/// the name in parentheses, may contain spaces.
fn process_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_separates_own_other_and_stolen_time() {
        let read = |machine: &str, process: &str, waited_nanos| CpuReading {
            processes: process_ticks(process).unwrap(),
            waited_nanos,
            ..machine_ticks(machine).unwrap()
        };
        let earlier = read(
            "cpu  100 0 100 700 50 0 0 50 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0",
            "7 (a b) c) S 1 7 7 0 -1 4194304 100 0 0 0 30 10 0 0 20 0",
            7_000_000,
        );
        let later = read(
            "cpu  150 10 120 800 50 0 0 70 0 0",
            "7 (a b) c) S 1 7 7 0 -1 4194304 100 0 0 0 60 20 0 0 20 0",
            107_000_000,
        );
        assert_eq!(
            later.usage_since(&earlier),
            CpuUsage {
                busy: 0.5,
                other_processes: 0.2,
                stolen: 0.1,
                waited: 0.25,
            }
        );
        assert_eq!(earlier.usage_since(&earlier), CpuUsage::default());
        assert_eq!(machine_ticks("intr 1 2").map(|reading| reading.total), None);
    }

    #[test]
    fn overload_is_reported_with_its_cause() {
        let idle = CpuUsage {
            busy: 0.5,
            other_processes: 0.05,
            stolen: 0.01,
            waited: 0.2,
        };
        let busy = CpuUsage { busy: 0.95, ..idle };
        let shared = CpuUsage {
            other_processes: 0.7,
            ..busy
        };
        assert_eq!(overload_warning(&[idle, busy, shared]), None);
        let stolen = CpuUsage {
            stolen: 0.2,
            ..idle
        };
        let waiting = |run| CpuUsage { waited: 1.2, ..run };
        for (run, cause) in [
            (stolen, "other virtual machines took 1 %, 20 %"),
            (waiting(shared), "other processes used 5 %, 70 %"),
            (waiting(busy), "busy for 50 %, 95 %"),
        ] {
            let warning = overload_warning(&[idle, run]).unwrap();
            assert!(warning.contains(cause), "{warning}");
        }
    }

    #[test]
    fn own_process_has_cpu_time() {
        let pid = std::process::id();
        let earlier = CpuReading::read(&[pid]);
        let mut sum = 0_u64;
        let later = loop {
            sum = std::hint::black_box(sum.wrapping_add(1));
            let reading = CpuReading::read(&[pid]);
            if reading.processes > earlier.processes && reading.total > earlier.total {
                break reading;
            }
        };
        assert!(later.usage_since(&earlier).busy > 0.0);
    }
}
