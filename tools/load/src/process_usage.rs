//! CPU time and memory of processes, as counted by the kernel.

use std::collections::HashMap;
use std::{fs, io};

/// CPU time of a process by thread. The time of a thread that ended since the last reading is lost.
/// The readings must therefore be closer together than the idle time after which a thread ends.
#[derive(Debug, Default)]
pub(crate) struct CpuTimes(HashMap<u32, u64>);

impl CpuTimes {
    /// Reads the CPU time of a process; empty if the process has ended.
    pub(crate) fn read(pid: u32) -> Self {
        let threads = fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten();
        let thread_nanos = |thread: fs::DirEntry| {
            let number = thread.file_name().to_str()?.parse().ok()?;
            let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
            Some((number, text.split(' ').next()?.parse().ok()?))
        };
        Self(threads.filter_map(thread_nanos).collect())
    }

    /// Returns the microseconds since an earlier reading.
    pub(crate) fn micros_since(&self, earlier: &Self) -> f64 {
        let thread_nanos = |(thread, now): (&u32, &u64)| {
            now - earlier.0.get(thread).copied().unwrap_or(0).min(*now)
        };
        self.0.iter().map(thread_nanos).sum::<u64>() as f64 / 1e3
    }
}

/// Resident memory of a process in MiB, current and peak.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryUse {
    pub(crate) resident: f64,
    pub(crate) peak: f64,
}

impl MemoryUse {
    /// Sets the peak of a process to its current memory, so that the next reading has the peak
    /// since this call. Linux documents the value 5 of `clear_refs` in proc_pid_clear_refs(5).
    pub(crate) fn reset_peak(pid: u32) -> io::Result<()> {
        fs::write(format!("/proc/{pid}/clear_refs"), "5")
    }

    /// Reads the memory of a process; zero if the process has ended.
    pub(crate) fn read(pid: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok())
                .unwrap_or(0.0)
                / 1024.0
        };
        Self {
            resident: field("VmRSS:"),
            peak: field("VmHWM:"),
        }
    }
}
