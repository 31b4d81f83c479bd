//! Prevents the fast library from starting threads. By default, the library distributes long texts
//! over spinning threads, one for each available core, although the cores are busy with other
//! requests. It reads the number of cores only once, so the first call runs on a thread that is
//! pinned to one core.

/// Makes the library use one core. Returns false if that is not possible.
pub(super) fn limit_to_one_core() -> bool {
    std::thread::scope(|scope| {
        let pinned = scope.spawn(|| {
            pin_to_one_core();
            // The first call reads the number of cores, and the library caches it.
            fastokens::fanout::threads()
        });
        // After a panic, the call below reads the number of all cores.
        let _ = pinned.join();
    });
    fastokens::fanout::threads() <= 1
}

#[cfg(target_os = "linux")]
fn pin_to_one_core() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(all) = sched_getaffinity(None) else {
        return;
    };
    if let Some(first) = (0..CpuSet::MAX_CPU).find(|core| all.is_set(*core)) {
        let mut one = CpuSet::new();
        one.set(first);
        // If pinning is not permitted, the fast library is not used.
        let _ = sched_setaffinity(None, &one);
    }
}

#[cfg(not(target_os = "linux"))]
fn pin_to_one_core() {}
