//! Naive model of the queue: one list that is sorted for every query, and rounds that visit one
//! class at a time.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::queue::{QueueClass, QueueDepth, QueueLane, QueueLimitKind, QueueMetadata, QueuePolicy};

#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub(super) id: usize,
    pub(super) class: usize,
    pub(super) metadata: QueueMetadata,
    pub(super) arrived: Duration,
}

pub(super) struct Model {
    classes: Vec<QueueClass>,
    /// In order of arrival.
    pub(super) waiting: Vec<Waiter>,
    /// Class and lane whose first request could not be placed, and that request.
    blocked: BTreeMap<(usize, QueueLane), usize>,
    rounds: Rounds,
}

#[derive(Clone)]
struct Rounds {
    deficits: Vec<u64>,
    at: usize,
    credited: bool,
}

impl Rounds {
    fn step(&mut self) {
        self.at = (self.at + 1) % self.deficits.len();
        self.credited = false;
    }
}

impl Model {
    pub(super) fn new(classes: Vec<QueueClass>) -> Self {
        let rounds = Rounds {
            deficits: vec![0; classes.len()],
            at: 0,
            credited: false,
        };
        Self {
            classes,
            waiting: vec![],
            blocked: BTreeMap::new(),
            rounds,
        }
    }

    pub(super) fn full(&self, class: usize, workers: u64) -> Option<(QueueLimitKind, u64, u64)> {
        let pending = self.pending(class);
        let limits = self.classes[class].limits;
        let all = [
            (QueueLimitKind::Requests, pending.requests, limits.requests),
            (
                QueueLimitKind::PromptTokens,
                pending.prompt_tokens,
                limits.prompt_tokens,
            ),
            (
                QueueLimitKind::CachedTokens,
                pending.cached_tokens,
                limits.cached_tokens,
            ),
        ];
        let limits_over_workers = all
            .into_iter()
            .filter_map(|(kind, current, limit)| Some((kind, current, limit? * workers)));
        limits_over_workers
            .into_iter()
            .find(|(_, current, limit)| current >= limit)
    }

    pub(super) fn push(&mut self, waiter: Waiter) {
        self.waiting.push(waiter);
        self.unblock_changed_lanes();
    }

    pub(super) fn remove(&mut self, id: usize) -> bool {
        let Some(at) = self.waiting.iter().position(|waiter| waiter.id == id) else {
            return false;
        };
        let removed = self.waiting.remove(at);
        if self
            .waiting
            .iter()
            .all(|waiter| waiter.class != removed.class)
        {
            self.rounds.deficits[removed.class] = 0;
            if self.rounds.at == removed.class {
                self.rounds.step();
            }
        }
        self.unblock_changed_lanes();
        true
    }

    pub(super) fn reopen(&mut self) {
        self.blocked.clear();
    }

    pub(super) fn next(&mut self, can_place: impl Fn(usize) -> bool) -> Option<usize> {
        loop {
            let mut rounds = self.rounds.clone();
            let classes = self.classes.len();
            if (0..classes).all(|class| self.first_open(class).is_none()) {
                return None;
            }
            let first = loop {
                if let Some(first) = self.first_open(rounds.at) {
                    if !rounds.credited {
                        rounds.deficits[rounds.at] += self.classes[rounds.at].quantum;
                        rounds.credited = true;
                    }
                    if rounds.deficits[rounds.at] >= cost(&first.metadata) {
                        break first.clone();
                    }
                }
                rounds.step();
            };
            if can_place(first.id) {
                rounds.deficits[rounds.at] -= cost(&first.metadata);
                self.rounds = rounds;
                self.remove(first.id);
                return Some(first.id);
            }
            self.blocked
                .insert((first.class, first.metadata.lane), first.id);
        }
    }

    pub(super) fn pending(&self, class: usize) -> QueueDepth {
        let mut pending = QueueDepth::default();
        for waiter in self.waiting.iter().filter(|waiter| waiter.class == class) {
            pending.requests += 1;
            pending.prompt_tokens += waiter.metadata.prompt_tokens;
            pending.cached_tokens += waiter
                .metadata
                .cached_tokens
                .min(waiter.metadata.prompt_tokens);
        }
        pending
    }

    /// Returns the requests of a class, in order. `sort_by` preserves the order of arrival among
    /// equals.
    fn sorted(&self, class: usize) -> Vec<&Waiter> {
        let mut found: Vec<_> = self
            .waiting
            .iter()
            .filter(|waiter| waiter.class == class)
            .collect();
        let policy = self.classes[class].policy;
        let rank = |waiter: &Waiter| {
            let metadata = &waiter.metadata;
            (Reverse(metadata.strict_priority), -score(policy, waiter))
        };
        found.sort_by(|a, b| rank(a).partial_cmp(&rank(b)).unwrap());
        found
    }

    fn first_open(&self, class: usize) -> Option<&Waiter> {
        let is_open = |waiter: &&Waiter| !self.blocked.contains_key(&(class, waiter.metadata.lane));
        self.sorted(class).into_iter().find(is_open)
    }

    /// Unblocks the lanes whose first request has changed.
    fn unblock_changed_lanes(&mut self) {
        let mut blocked = std::mem::take(&mut self.blocked);
        blocked.retain(|(class, lane), id| {
            let sorted = self.sorted(*class);
            sorted
                .iter()
                .find(|waiter| waiter.metadata.lane == *lane)
                .is_some_and(|first| first.id == *id)
        });
        self.blocked = blocked;
    }
}

fn cost(metadata: &QueueMetadata) -> u64 {
    if metadata.cached_tokens >= metadata.prompt_tokens {
        1
    } else {
        metadata.prompt_tokens - metadata.cached_tokens
    }
}

fn score(policy: QueuePolicy, waiter: &Waiter) -> f64 {
    let jump = if waiter.metadata.priority_jump > 0.0 {
        waiter.metadata.priority_jump
    } else {
        0.0
    };
    let arrived = waiter.arrived.as_secs_f64();
    match policy {
        QueuePolicy::Fcfs => jump - arrived,
        QueuePolicy::Lcfs => jump + arrived,
        QueuePolicy::Wspt => (1.0 + jump) / cost(&waiter.metadata) as f64,
    }
}
