//! Calls that wait to be made: in order for one session of one engine, a few at once to one engine, and no engine waits for
//! another, so that one that hangs delays nobody else.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::worker::Endpoint;

/// Most calls that wait.
pub(super) const MOST_WAITING: usize = 16_384;

/// Most calls to one engine at once.
pub(super) const AT_ONCE: usize = 8;

/// What an engine is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    Open,
    Close,
}

/// One session of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) endpoint: Endpoint,
    pub(super) id: String,
}

#[derive(Debug, Default)]
struct Lane {
    waiting: VecDeque<(String, Word)>,
    running: HashSet<String>,
}

#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: HashMap<Endpoint, Lane>,
    /// Engines to which another call may be possible.
    ready: VecDeque<Endpoint>,
    waiting: usize,
}

impl Lanes {
    /// Adds a call, unless too many wait.
    pub(super) fn push(&mut self, place: Place, word: Word) -> bool {
        if self.waiting >= MOST_WAITING {
            return false;
        }
        self.waiting += 1;
        self.lanes.entry(place.endpoint).or_default().waiting.push_back((place.id, word));
        self.ready.push_back(place.endpoint);
        true
    }

    /// The next call that can be made; [`Lanes::done`] must follow.
    pub(super) fn next(&mut self) -> Option<(Place, Word)> {
        while let Some(endpoint) = self.ready.front().copied() {
            match self.lanes.get_mut(&endpoint).and_then(Lane::next) {
                Some((id, word)) => {
                    self.waiting -= 1;
                    return Some((Place { endpoint, id }, word));
                }
                None => drop(self.ready.pop_front()),
            }
        }
        None
    }

    /// A call has ended.
    pub(super) fn done(&mut self, place: &Place) {
        let Some(lane) = self.lanes.get_mut(&place.endpoint) else { return };
        lane.running.remove(&place.id);
        if lane.running.is_empty() && lane.waiting.is_empty() {
            self.lanes.remove(&place.endpoint);
        } else {
            self.ready.push_back(place.endpoint);
        }
    }
}

impl Lane {
    fn next(&mut self) -> Option<(String, Word)> {
        if self.running.len() >= AT_ONCE {
            return None;
        }
        let at = self.waiting.iter().position(|(id, _)| !self.running.contains(id))?;
        let (id, word) = self.waiting.remove(at)?;
        self.running.insert(id.clone());
        Some((id, word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(port: u16, id: &str) -> Place {
        Place { endpoint: Endpoint(([127, 0, 0, 1], port).into()), id: id.to_owned() }
    }

    #[test]
    fn one_session_is_told_in_order_and_others_do_not_wait_for_it() {
        let mut lanes = Lanes::default();
        for (port, id, word) in
            [(1, "a", Word::Open), (1, "a", Word::Close), (1, "b", Word::Open), (2, "a", Word::Open)]
        {
            assert!(lanes.push(place(port, id), word));
        }
        let first = [lanes.next(), lanes.next(), lanes.next(), lanes.next()].map(|call| call.map(|(place, _)| place));
        assert_eq!(first, [Some(place(1, "a")), Some(place(1, "b")), Some(place(2, "a")), None]);
        lanes.done(&place(1, "b"));
        assert_eq!(lanes.next(), None);
        lanes.done(&place(1, "a"));
        assert_eq!(lanes.next(), Some((place(1, "a"), Word::Close)));
        lanes.done(&place(1, "a"));
        lanes.done(&place(2, "a"));
        assert_eq!((lanes.next(), lanes.lanes.len(), lanes.waiting), (None, 0, 0));
    }

    #[test]
    fn an_engine_is_asked_a_few_things_at_once_and_what_waits_is_bounded() {
        let mut lanes = Lanes::default();
        for nth in 0..MOST_WAITING {
            assert!(lanes.push(place(1, &nth.to_string()), Word::Open));
        }
        assert!(!lanes.push(place(2, "late"), Word::Open));
        let running: Vec<_> = std::iter::from_fn(|| lanes.next()).collect();
        assert_eq!(running.len(), AT_ONCE);
        assert!(lanes.push(place(2, "a"), Word::Open));
        assert_eq!(lanes.next(), Some((place(2, "a"), Word::Open)));
        lanes.done(&running[0].0);
        assert_eq!(lanes.next().map(|(place, _)| place.id), Some(AT_ONCE.to_string()));
    }
}
