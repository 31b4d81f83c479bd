//! Queued requests of one class. A lane holds the requests that compete for the same workers, in
//! order; its first request blocks only its own lane. Lanes whose first request could not be placed
//! are set aside until capacity is freed. The cost of a pass therefore depends on the changes, not
//! on the length of the queue.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::metadata::{QueueEntry, QueueLane};
use super::order::QueuePosition;

/// Queued amounts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueDepth {
    /// Number of requests.
    pub requests: u64,
    /// Sum of their prompt tokens.
    pub prompt_tokens: u64,
    /// Sum of the tokens that were cached at best when each request arrived.
    pub cached_tokens: u64,
}

#[derive(Debug)]
pub(super) struct ClassLanes<T> {
    /// Lanes by the workers they compete for. No lane is empty.
    lanes: BTreeMap<QueueLane, BTreeMap<QueuePosition, QueueEntry<T>>>,
    /// First request of each lane that is not known to be blocked.
    open: BTreeSet<(QueuePosition, QueueLane)>,
    depth: QueueDepth,
}

impl<T> Default for ClassLanes<T> {
    fn default() -> Self {
        Self {
            lanes: BTreeMap::new(),
            open: BTreeSet::new(),
            depth: QueueDepth::default(),
        }
    }
}

impl<T> ClassLanes<T> {
    pub(super) fn depth(&self) -> QueueDepth {
        self.depth
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    pub(super) fn push(&mut self, position: QueuePosition, entry: QueueEntry<T>) {
        let name = entry.metadata.lane;
        self.depth.requests += 1;
        self.depth.prompt_tokens += entry.metadata.prompt_tokens;
        self.depth.cached_tokens += entry.metadata.cached_tokens;
        let lane = self.lanes.entry(name).or_default();
        let first = lane.first_key_value().map(|(first, _)| *first);
        lane.insert(position, entry);
        if first.is_none_or(|first| position < first) {
            // The lane was blocked, if at all, for another first request.
            first
                .into_iter()
                .for_each(|first| _ = self.open.remove(&(first, name)));
            self.open.insert((position, name));
        }
    }

    pub(super) fn remove(
        &mut self,
        position: QueuePosition,
        name: QueueLane,
    ) -> Option<QueueEntry<T>> {
        let lane = self.lanes.get_mut(&name)?;
        let was_first = lane
            .first_key_value()
            .is_some_and(|(first, _)| *first == position);
        let entry = lane.remove(&position)?;
        if was_first {
            self.open.remove(&(position, name));
            self.open
                .extend(lane.first_key_value().map(|(next, _)| (*next, name)));
        }
        if lane.is_empty() {
            self.lanes.remove(&name);
        }
        self.depth.requests -= 1;
        self.depth.prompt_tokens -= entry.metadata.prompt_tokens;
        self.depth.cached_tokens -= entry.metadata.cached_tokens;
        Some(entry)
    }

    pub(super) fn contains(&self, position: QueuePosition, name: QueueLane) -> bool {
        self.lanes
            .get(&name)
            .is_some_and(|lane| lane.contains_key(&position))
    }

    /// Returns the first request over all lanes that are not known to be blocked.
    pub(super) fn first(&self) -> Option<(QueuePosition, &QueueEntry<T>)> {
        let (position, name) = self.open.first()?;
        Some((*position, self.lanes.get(name)?.get(position)?))
    }

    /// Like [`Self::first`], with mutable access.
    pub(super) fn first_mut(&mut self) -> Option<(QueuePosition, &mut QueueEntry<T>)> {
        let (position, name) = self.open.first()?;
        Some((*position, self.lanes.get_mut(name)?.get_mut(position)?))
    }

    /// Blocks the lane of the request that [`ClassLanes::first`] returns.
    pub(super) fn block_first(&mut self) {
        self.open.pop_first();
    }

    /// Unblocks all lanes.
    pub(super) fn unblock_all(&mut self) {
        if self.open.len() < self.lanes.len() {
            let firsts = self
                .lanes
                .iter()
                .filter_map(|(name, lane)| Some((*lane.first_key_value()?.0, *name)));
            self.open.extend(firsts);
        }
    }
}
