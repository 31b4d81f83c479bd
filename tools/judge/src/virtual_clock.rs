//! Virtual time: a clock for the router, and the queue of events that advance it.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{self, AtomicU64};
use std::time::{Duration, Instant};

/// Clock that moves only when it is set. Clones share the time.
#[derive(Clone, Debug)]
pub(crate) struct VirtualClock {
    start: Instant,
    nanoseconds: Arc<AtomicU64>,
}

impl VirtualClock {
    /// Creates a clock at time 0.
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            nanoseconds: Arc::default(),
        }
    }

    /// Sets the time, in milliseconds since the start.
    pub(crate) fn set_ms(&self, now_ms: f64) {
        let nanoseconds = (now_ms * 1e6) as u64;
        self.nanoseconds
            .store(nanoseconds, atomic::Ordering::Relaxed);
    }

    /// Returns the current time.
    pub(crate) fn now(&self) -> Instant {
        let nanoseconds = self.nanoseconds.load(atomic::Ordering::Relaxed);
        self.start + Duration::from_nanos(nanoseconds)
    }
}

/// Queue of future events, by time. Events of the same time keep the order of their insertion.
#[derive(Debug)]
pub(crate) struct EventTimeline<E> {
    events: BinaryHeap<TimedEvent<E>>,
    last_number: u64,
}

/// Event and its time.
#[derive(Debug)]
pub(crate) struct TimedEvent<E> {
    /// Time in milliseconds since the start.
    pub(crate) time_ms: f64,
    number: u64,
    /// The event.
    pub(crate) event: E,
}

impl<E> EventTimeline<E> {
    /// Creates an empty queue.
    pub(crate) fn new() -> Self {
        Self {
            events: BinaryHeap::new(),
            last_number: 0,
        }
    }

    /// Adds an event.
    pub(crate) fn push(&mut self, time_ms: f64, event: E) {
        self.last_number += 1;
        self.events.push(TimedEvent {
            time_ms,
            number: self.last_number,
            event,
        });
    }

    /// Removes the next event.
    pub(crate) fn pop(&mut self) -> Option<TimedEvent<E>> {
        self.events.pop()
    }
}

impl<E> PartialEq for TimedEvent<E> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<E> Eq for TimedEvent<E> {}

impl<E> PartialOrd for TimedEvent<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for TimedEvent<E> {
    /// Orders earlier events as greater, because the heap returns the greatest one first.
    fn cmp(&self, other: &Self) -> Ordering {
        other
            .time_ms
            .total_cmp(&self.time_ms)
            .then(other.number.cmp(&self.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_ordered_by_time_and_insertion() {
        let mut timeline = EventTimeline::new();
        for (time_ms, event) in [(2.0, 'c'), (1.0, 'a'), (1.0, 'b')] {
            timeline.push(time_ms, event);
        }
        let order: String =
            std::iter::from_fn(|| timeline.pop().map(|timed| timed.event)).collect();
        assert_eq!(order, "abc");
    }
}
