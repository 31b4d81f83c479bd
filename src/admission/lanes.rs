//! Those who wait in one class. A lane holds requests that compete for the same workers, in order; its first one stops
//! the rest of its lane and nobody else. Lanes whose first request was found blocked are set aside until there is a
//! reason to look again, so that looking costs what has changed and not what waits.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::policy::Place;
use super::turn::{Entry, Lane};

/// How much waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    /// Requests.
    pub requests: u64,
    /// Their prompt tokens.
    pub prompt_tokens: u64,
    /// How many of these were cached, at best, when the request came.
    pub cached_tokens: u64,
}

#[derive(Debug)]
pub(super) struct Lanes<T> {
    /// No lane is empty.
    lanes: BTreeMap<Lane, BTreeMap<Place, Entry<T>>>,
    /// The first of each lane that is not known to be blocked.
    open: BTreeSet<(Place, Lane)>,
    pending: Pending,
}

impl<T> Default for Lanes<T> {
    fn default() -> Self {
        Self {
            lanes: BTreeMap::new(),
            open: BTreeSet::new(),
            pending: Pending::default(),
        }
    }
}

impl<T> Lanes<T> {
    pub(super) fn pending(&self) -> Pending {
        self.pending
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    pub(super) fn push(&mut self, place: Place, entry: Entry<T>) {
        let name = entry.turn.lane;
        self.pending.requests += 1;
        self.pending.prompt_tokens += entry.turn.prompt_tokens;
        self.pending.cached_tokens += entry.turn.cached_tokens;
        let lane = self.lanes.entry(name).or_default();
        let first = lane.first_key_value().map(|(first, _)| *first);
        lane.insert(place, entry);
        if first.is_none_or(|first| place < first) {
            // Whatever was known of the lane was known of another.
            first
                .into_iter()
                .for_each(|first| _ = self.open.remove(&(first, name)));
            self.open.insert((place, name));
        }
    }

    pub(super) fn remove(&mut self, place: Place, name: Lane) -> Option<Entry<T>> {
        let lane = self.lanes.get_mut(&name)?;
        let was_first = lane
            .first_key_value()
            .is_some_and(|(first, _)| *first == place);
        let entry = lane.remove(&place)?;
        if was_first {
            self.open.remove(&(place, name));
            self.open
                .extend(lane.first_key_value().map(|(next, _)| (*next, name)));
        }
        if lane.is_empty() {
            self.lanes.remove(&name);
        }
        self.pending.requests -= 1;
        self.pending.prompt_tokens -= entry.turn.prompt_tokens;
        self.pending.cached_tokens -= entry.turn.cached_tokens;
        Some(entry)
    }

    pub(super) fn contains(&self, place: Place, name: Lane) -> bool {
        self.lanes
            .get(&name)
            .is_some_and(|lane| lane.contains_key(&place))
    }

    /// The first of all lanes that are not known to be blocked.
    pub(super) fn first(&self) -> Option<(Place, &Entry<T>)> {
        let (place, name) = self.open.first()?;
        Some((*place, self.lanes.get(name)?.get(place)?))
    }

    /// The same, to be changed.
    pub(super) fn first_mut(&mut self) -> Option<(Place, &mut Entry<T>)> {
        let (place, name) = self.open.first()?;
        Some((*place, self.lanes.get_mut(name)?.get_mut(place)?))
    }

    /// The lane of the first one is blocked.
    pub(super) fn block_first(&mut self) {
        self.open.pop_first();
    }

    /// No lane is known to be blocked.
    pub(super) fn reopen(&mut self) {
        if self.open.len() < self.lanes.len() {
            let firsts = self
                .lanes
                .iter()
                .filter_map(|(name, lane)| Some((*lane.first_key_value()?.0, *name)));
            self.open.extend(firsts);
        }
    }
}
