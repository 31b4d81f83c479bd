//! What the heap holds and how often it was asked, of both sides by the same rule: a piece counts with what glibc's
//! allocator takes for it. Counting is switched on for rows of memory alone; otherwise it costs one predictable branch.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

static COUNTING: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicI64 = AtomicI64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, counted.
pub struct Counted;

/// What glibc takes for a piece: a header of 8 bytes, whole 16, at least 32.
fn taken(size: usize) -> i64 {
    ((size + 8).next_multiple_of(16)).max(32) as i64
}

fn note(change: i64, calls: u64, bytes: usize) {
    if COUNTING.load(Relaxed) {
        LIVE.fetch_add(change, Relaxed);
        CALLS.fetch_add(calls, Relaxed);
        BYTES.fetch_add(bytes as u64, Relaxed);
    }
}

// SAFETY: every call is handed to the system's allocator unchanged; only numbers are kept beside it. A global allocator
// cannot be had without unsafe, and nothing else tells what both sides hold by one rule.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(taken(layout.size()), 1, layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(taken(layout.size()), 1, layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        note(-taken(layout.size()), 0, 0);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(
            taken(size) - taken(layout.size()),
            1,
            size.saturating_sub(layout.size()),
        );
        // SAFETY: as the caller promised.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Calls of the allocator, and the bytes they asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked {
    pub calls: u64,
    pub bytes: u64,
}

/// Bytes that a value holds on the heap, with all that is made while it is built and stays. It is dropped before this
/// answers, and all of it must be gone then.
pub fn held<T>(build: impl FnOnce() -> T) -> f64 {
    let before = LIVE.load(Relaxed);
    COUNTING.store(true, Relaxed);
    let built = build();
    let held = LIVE.load(Relaxed) - before;
    drop(built);
    let gone = || (LIVE.load(Relaxed) - before).abs() < 1_000_000 + held / 50;
    // Threads that it has told to end may still hold something.
    let deadline = Instant::now() + Duration::from_secs(20);
    while !gone() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert!(
        gone(),
        "{} of {held} bytes are left after it was dropped",
        LIVE.load(Relaxed) - before
    );
    COUNTING.store(false, Relaxed);
    held as f64
}

/// What some work asks of the allocator.
pub fn asked(work: impl FnOnce()) -> Asked {
    let (calls, bytes) = (CALLS.load(Relaxed), BYTES.load(Relaxed));
    COUNTING.store(true, Relaxed);
    work();
    COUNTING.store(false, Relaxed);
    Asked {
        calls: CALLS.load(Relaxed) - calls,
        bytes: BYTES.load(Relaxed) - bytes,
    }
}
