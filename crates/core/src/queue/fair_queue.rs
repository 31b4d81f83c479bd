//! The queue as a pure data structure, without clock and workers: the caller passes arrival times
//! and attempts each placement. Deficit round robin shares capacity between classes. Within a class
//! the queue policy applies. A request that cannot be placed blocks only its own lane.
//!
//! Decision 0046.

use std::sync::Arc;
use std::time::Instant;

use super::classes::{ClassId, QueueClasses, QueueLimitKind};
use super::deficit_round_robin::DeficitRoundRobin;
use super::lanes::{ClassLanes, QueueDepth};
use super::metadata::{QueueEntry, QueueLane};
use super::order::QueuePosition;

/// Maximum number of tokens that one request counts for. Prompt lengths may be estimates from
/// client data, and sums must not overflow.
const MAX_TOKENS: u64 = 1 << 40;

/// Position of a queued request, which finds it without a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueTicket {
    class: ClassId,
    lane: QueueLane,
    position: QueuePosition,
}

/// Limit of a class that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOverflow {
    /// Kind of the limit.
    pub kind: QueueLimitKind,
    /// Queued amount.
    pub current: u64,
    /// Limit over all workers.
    pub limit: u64,
}

/// All queued requests.
#[derive(Debug)]
pub struct FairQueue<T> {
    classes: Arc<QueueClasses>,
    lanes: Vec<ClassLanes<T>>,
    scheduler: DeficitRoundRobin,
    started_at: Instant,
    next_number: u64,
}

impl<T> FairQueue<T> {
    /// Creates an empty queue. Arrivals must not be earlier than `started_at`.
    pub fn new(classes: Arc<QueueClasses>, started_at: Instant) -> Self {
        let quanta = classes.iter().map(|class| class.quantum).collect();
        let lanes = classes.iter().map(|_| ClassLanes::default()).collect();
        Self {
            classes,
            lanes,
            scheduler: DeficitRoundRobin::new(quanta),
            started_at,
            next_number: 0,
        }
    }

    /// Returns the first limit of a class that is reached. One request may cross a limit; the next
    /// one is rejected.
    pub fn find_overflow(&self, class: ClassId, workers: usize) -> Option<QueueOverflow> {
        let depth = self.lanes[class.index()].depth();
        self.classes
            .get(class)
            .limits
            .iter()
            .find_map(|(kind, per_worker)| {
                let current = match kind {
                    QueueLimitKind::Requests => depth.requests,
                    QueueLimitKind::PromptTokens => depth.prompt_tokens,
                    QueueLimitKind::CachedTokens => depth.cached_tokens,
                };
                let limit = per_worker?.saturating_mul(workers as u64);
                (current >= limit).then_some(QueueOverflow {
                    kind,
                    current,
                    limit,
                })
            })
    }

    /// Queues a request, regardless of the limits.
    pub fn push(&mut self, mut entry: QueueEntry<T>) -> QueueTicket {
        let metadata = &mut entry.metadata;
        metadata.prompt_tokens = metadata.prompt_tokens.min(MAX_TOKENS);
        metadata.cached_tokens = metadata.cached_tokens.min(metadata.prompt_tokens);
        let class = entry.class;
        let arrival = entry.arrived_at.saturating_duration_since(self.started_at);
        let policy = self.classes.get(class).policy;
        let position = QueuePosition {
            strict_priority: metadata.strict_priority,
            score: policy.score(metadata, arrival),
            number: self.next_number,
        };
        self.next_number += 1;
        let ticket = QueueTicket {
            class,
            lane: metadata.lane,
            position,
        };
        self.lanes[class.index()].push(position, entry);
        ticket
    }

    /// Removes a request. Returns `None` if it is not queued any more.
    pub fn remove(&mut self, ticket: QueueTicket) -> Option<QueueEntry<T>> {
        let class = ticket.class.index();
        let entry = self.lanes[class].remove(ticket.position, ticket.lane)?;
        if self.lanes[class].is_empty() {
            self.scheduler.reset_class(class);
        }
        Some(entry)
    }

    /// Returns whether a request is still queued.
    pub fn contains(&self, ticket: QueueTicket) -> bool {
        self.lanes[ticket.class.index()].contains(ticket.position, ticket.lane)
    }

    /// Places the next request with `attempt` and returns its result. If `attempt` returns `None`,
    /// the lane of that request is blocked until [`FairQueue::unblock_all`]. Returns `None` if all
    /// lanes are blocked.
    pub fn place_next<R>(
        &mut self,
        mut attempt: impl FnMut(&mut QueueEntry<T>) -> Option<R>,
    ) -> Option<(QueueEntry<T>, R)> {
        loop {
            let plan = self.scheduler.plan(|class| cost(&self.lanes[class]))?;
            let lanes = &mut self.lanes[plan.class];
            let (position, entry) = lanes.first_mut()?;
            let Some(result) = attempt(entry) else {
                lanes.block_first();
                continue;
            };
            let ticket = QueueTicket {
                class: ClassId(plan.class),
                lane: entry.metadata.lane,
                position,
            };
            self.scheduler
                .commit(plan, |class| cost(&self.lanes[class]));
            return Some((self.remove(ticket)?, result));
        }
    }

    /// Unblocks all lanes, because capacity may have been freed.
    pub fn unblock_all(&mut self) {
        self.lanes.iter_mut().for_each(ClassLanes::unblock_all);
    }

    /// Returns the queued amounts of a class.
    pub fn depth(&self, class: ClassId) -> QueueDepth {
        self.lanes[class.index()].depth()
    }

    /// Returns the number of queued requests.
    pub fn len(&self) -> usize {
        self.lanes
            .iter()
            .map(|lanes| lanes.depth().requests as usize)
            .sum()
    }

    /// Returns whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(ClassLanes::is_empty)
    }
}

fn cost<T>(lanes: &ClassLanes<T>) -> Option<u64> {
    lanes.first().map(|(_, entry)| entry.metadata.cost())
}

#[cfg(test)]
mod tests;
