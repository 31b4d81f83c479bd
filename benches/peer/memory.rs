//! Heap size and allocator calls of both sides, measured by the same rule: an allocation counts
//! with the size that glibc's allocator uses for it. Counting is enabled for the memory rows only.
//! When it is disabled, it costs one predictable branch.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

static COUNTING: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicI64 = AtomicI64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// The system allocator with counters.
pub struct CountingAllocator;

/// Returns the size of an allocation in glibc: an 8-byte header, rounded up to 16 bytes, at least
/// 32 bytes.
fn allocation_size(size: usize) -> i64 {
    ((size + 8).next_multiple_of(16)).max(32) as i64
}

fn count(change: i64, calls: u64, bytes: usize) {
    if COUNTING.load(Relaxed) {
        LIVE.fetch_add(change, Relaxed);
        CALLS.fetch_add(calls, Relaxed);
        BYTES.fetch_add(bytes as u64, Relaxed);
    }
}

// SAFETY: every call is forwarded to the system allocator unchanged; only counters are updated. A
// global allocator requires unsafe code, and no other method measures both sides alike.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(allocation_size(layout.size()), 1, layout.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(allocation_size(layout.size()), 1, layout.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-allocation_size(layout.size()), 0, 0);
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(
            allocation_size(size) - allocation_size(layout.size()),
            1,
            size.saturating_sub(layout.size()),
        );
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Allocator calls and requested bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocatorUsage {
    pub calls: u64,
    pub bytes: u64,
}

/// Returns the heap bytes of a value, including everything that building it leaves behind. The
/// value is dropped before the function returns, and all its memory must be released by then.
pub fn heap_bytes<T>(build: impl FnOnce() -> T) -> f64 {
    let before = LIVE.load(Relaxed);
    COUNTING.store(true, Relaxed);
    let built = build();
    let held = LIVE.load(Relaxed) - before;
    drop(built);
    let is_released = || (LIVE.load(Relaxed) - before).abs() < 1_000_000 + held / 50;
    // Threads that were requested to stop may still hold memory.
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_released() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert!(
        is_released(),
        "{} of {held} bytes are not released after the drop",
        LIVE.load(Relaxed) - before
    );
    COUNTING.store(false, Relaxed);
    held as f64
}

/// Counts the allocations of some work.
pub fn count_allocations(work: impl FnOnce()) -> AllocatorUsage {
    let calls = CALLS.load(Relaxed);
    let bytes = BYTES.load(Relaxed);
    COUNTING.store(true, Relaxed);
    work();
    COUNTING.store(false, Relaxed);
    AllocatorUsage {
        calls: CALLS.load(Relaxed) - calls,
        bytes: BYTES.load(Relaxed) - bytes,
    }
}
