//! What processes cost, as the kernel counts it: CPU time to the nanosecond, by thread, and memory.

use std::collections::HashMap;
use std::fs;

/// CPU time of a process so far, by thread. A thread that has ended takes what it used since the last reading with it, so
/// readings have to be closer together than threads are idle before they end.
#[derive(Debug, Default)]
pub(crate) struct Cpu(HashMap<u32, u64>);

impl Cpu {
    /// Of a process; nothing of one that is gone.
    pub(crate) fn of(pid: u32) -> Self {
        let threads = fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten();
        let of_thread = |thread: fs::DirEntry| {
            let number = thread.file_name().to_str()?.parse().ok()?;
            let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
            Some((number, text.split(' ').next()?.parse().ok()?))
        };
        Self(threads.filter_map(of_thread).collect())
    }

    /// Microseconds from an earlier reading to this one.
    pub(crate) fn micros_since(&self, earlier: &Self) -> f64 {
        let of_thread = |(thread, now): (&u32, &u64)| {
            now - earlier.0.get(thread).copied().unwrap_or(0).min(*now)
        };
        self.0.iter().map(of_thread).sum::<u64>() as f64 / 1e3
    }
}

/// Resident memory of a process in MiB, now and at most so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) now: f64,
    pub(crate) peak: f64,
}

impl Memory {
    /// Of a process; nothing of one that is gone.
    pub(crate) fn of(pid: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok())
                .unwrap_or(0.0)
                / 1024.0
        };
        Self {
            now: field("VmRSS:"),
            peak: field("VmHWM:"),
        }
    }
}
