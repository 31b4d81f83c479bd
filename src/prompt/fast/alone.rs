//! The fast library spreads long texts over threads of its own, one for each core that it may use, and lets them spin. Our
//! cores are busy with other requests, so it must not: it looks once how many cores there are, and it does so here, on a
//! thread that may use a single one.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs something on a thread of one core; nothing if it panics.
pub(super) fn run<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            keep_to_one_core();
            // From now on it knows of no other.
            fastokens::fanout::threads();
            catch_unwind(AssertUnwindSafe(work)).ok()
        });
        work.join().ok().flatten()
    })
}

/// Whether it found one core.
pub(super) fn is_so() -> bool {
    fastokens::fanout::threads() <= 1
}

#[cfg(target_os = "linux")]
fn keep_to_one_core() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(all) = sched_getaffinity(None) else {
        return;
    };
    if let Some(first) = (0..CpuSet::MAX_CPU).find(|core| all.is_set(*core)) {
        let mut one = CpuSet::new();
        one.set(first);
        // Where it is forbidden, the fast library is not used.
        let _ = sched_setaffinity(None, &one);
    }
}

#[cfg(not(target_os = "linux"))]
fn keep_to_one_core() {}
