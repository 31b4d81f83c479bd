//! Calls that wait to be made: in order for one session of one engine, a few at once to one engine, and no engine waits for
//! another, so that one that hangs delays nobody else and takes nobody else's room.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use crate::worker::Endpoint;

/// Most sessions of one engine for which a call waits when another is to be opened. Closing has no such limit: only what
/// was opened is closed, so what waits to be closed is never more than that.
pub(super) const MOST_WAITING: usize = 4096;

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

/// What is still to be said of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Open,
    Close,
    /// To be closed, and then opened.
    Anew,
}

#[derive(Debug, Default)]
struct Lane {
    waiting: HashMap<String, (u64, Wanted)>,
    /// Whose turn it is.
    order: BTreeMap<u64, String>,
    count: u64,
    running: HashSet<String>,
}

#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: HashMap<Endpoint, Lane>,
    /// Engines to which another call may be possible.
    ready: VecDeque<Endpoint>,
}

impl Lanes {
    /// Asks for a session to be opened; false where too many calls to its engine wait.
    pub(super) fn open(&mut self, place: Place) -> bool {
        let lane = self.lanes.entry(place.endpoint).or_default();
        let many = lane.waiting.len() >= MOST_WAITING;
        match lane.waiting.get_mut(&place.id) {
            Some((_, wanted @ Wanted::Close)) => *wanted = Wanted::Anew,
            Some(_) => {}
            None if many => return false,
            None => lane.wait(place.id, Wanted::Open),
        }
        self.ready.push_back(place.endpoint);
        true
    }

    /// Asks for a session to be closed. What was never begun to be opened is no longer asked for; `is_open` says whether
    /// the engine may have it open.
    pub(super) fn close(&mut self, place: Place, is_open: bool) {
        let lane = self.lanes.entry(place.endpoint).or_default();
        match lane.waiting.get_mut(&place.id) {
            Some((_, Wanted::Open)) if !is_open => lane.forget(&place.id),
            Some((_, wanted)) => *wanted = Wanted::Close,
            None if is_open || lane.running.contains(&place.id) => {
                lane.wait(place.id, Wanted::Close)
            }
            None => {}
        }
        self.ready.push_back(place.endpoint);
        self.tidy(place.endpoint);
    }

    /// The next call that can be made; [`Lanes::done`] must follow.
    pub(super) fn next(&mut self) -> Option<(Place, Word)> {
        while let Some(endpoint) = self.ready.front().copied() {
            match self.lanes.get_mut(&endpoint).and_then(Lane::next) {
                Some((id, word)) => return Some((Place { endpoint, id }, word)),
                None => drop(self.ready.pop_front()),
            }
        }
        None
    }

    /// A call has ended.
    pub(super) fn done(&mut self, place: &Place) {
        let Some(lane) = self.lanes.get_mut(&place.endpoint) else {
            return;
        };
        lane.running.remove(&place.id);
        self.ready.push_back(place.endpoint);
        self.tidy(place.endpoint);
    }

    /// Marks all calls as ended.
    pub(super) fn restart(&mut self) {
        for (endpoint, lane) in &mut self.lanes {
            lane.running.clear();
            self.ready.push_back(*endpoint);
        }
        self.lanes.retain(|_, lane| !lane.waiting.is_empty());
    }

    /// Forgets what is still to be said of a session: somebody else sees to it.
    pub(super) fn forget(&mut self, place: &Place) {
        if let Some(lane) = self.lanes.get_mut(&place.endpoint) {
            lane.forget(&place.id);
        }
        self.tidy(place.endpoint);
    }

    /// Forgets what waits for an engine.
    pub(super) fn discard(&mut self, endpoint: Endpoint) {
        if let Some(lane) = self.lanes.get_mut(&endpoint) {
            lane.waiting.clear();
            lane.order.clear();
        }
        self.tidy(endpoint);
    }

    fn tidy(&mut self, endpoint: Endpoint) {
        if self
            .lanes
            .get(&endpoint)
            .is_some_and(|lane| lane.running.is_empty() && lane.waiting.is_empty())
        {
            self.lanes.remove(&endpoint);
        }
    }
}

impl Lane {
    fn wait(&mut self, id: String, wanted: Wanted) {
        self.count += 1;
        self.order.insert(self.count, id.clone());
        self.waiting.insert(id, (self.count, wanted));
    }

    fn forget(&mut self, id: &str) {
        if let Some((turn, _)) = self.waiting.remove(id) {
            self.order.remove(&turn);
        }
    }

    fn next(&mut self) -> Option<(String, Word)> {
        if self.running.len() >= AT_ONCE {
            return None;
        }
        // A session waits once, so there are fewer to skip than calls at once.
        let id = self
            .order
            .values()
            .find(|id| !self.running.contains(*id))?
            .clone();
        self.running.insert(id.clone());
        let (_, wanted) = self.waiting.get_mut(&id)?;
        let word = match wanted {
            Wanted::Open => Word::Open,
            Wanted::Close => Word::Close,
            Wanted::Anew => {
                *wanted = Wanted::Open;
                return Some((id, Word::Close));
            }
        };
        self.forget(&id);
        Some((id, word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(port: u16, id: &str) -> Place {
        Place {
            endpoint: Endpoint(([127, 0, 0, 1], port).into()),
            id: id.to_owned(),
        }
    }

    #[test]
    fn one_session_is_told_in_order_and_others_do_not_wait_for_it() {
        let mut lanes = Lanes::default();
        lanes.open(place(1, "a"));
        assert_eq!(lanes.next(), Some((place(1, "a"), Word::Open)));
        // Its opening is under way, so it may be open.
        lanes.close(place(1, "a"), false);
        lanes.open(place(1, "a"));
        lanes.open(place(1, "b"));
        lanes.open(place(2, "a"));
        let next =
            [lanes.next(), lanes.next(), lanes.next()].map(|call| call.map(|(place, _)| place));
        assert_eq!(next, [Some(place(1, "b")), Some(place(2, "a")), None]);
        lanes.done(&place(1, "b"));
        assert_eq!(lanes.next(), None);
        for word in [Word::Close, Word::Open] {
            lanes.done(&place(1, "a"));
            assert_eq!(lanes.next(), Some((place(1, "a"), word)));
            assert_eq!(lanes.next(), None);
        }
        lanes.done(&place(1, "a"));
        lanes.done(&place(2, "a"));
        assert_eq!((lanes.next(), lanes.lanes.len()), (None, 0));
    }

    #[test]
    fn what_ended_before_it_was_told_of_is_not_told_at_all() {
        let mut lanes = Lanes::default();
        lanes.open(place(1, "a"));
        lanes.close(place(1, "a"), false);
        assert_eq!((lanes.next(), lanes.lanes.len()), (None, 0));
        // Open since before, and to be closed once however often it came and went.
        lanes.close(place(1, "a"), true);
        lanes.open(place(1, "a"));
        lanes.close(place(1, "a"), true);
        assert_eq!(lanes.next(), Some((place(1, "a"), Word::Close)));
        lanes.done(&place(1, "a"));
        assert_eq!((lanes.next(), lanes.lanes.len()), (None, 0));
        lanes.close(place(1, "never opened"), false);
        assert_eq!((lanes.next(), lanes.lanes.len()), (None, 0));
    }

    #[test]
    fn an_engine_that_says_nothing_takes_no_room_of_others_and_no_closing_is_lost() {
        let mut lanes = Lanes::default();
        for nth in 0..MOST_WAITING {
            assert!(lanes.open(place(1, &nth.to_string())));
        }
        assert!(!lanes.open(place(1, "late")));
        assert!(lanes.open(place(2, "a")));
        lanes.close(place(1, "open"), true);
        let running: Vec<_> = std::iter::from_fn(|| lanes.next()).collect();
        assert_eq!(
            running
                .iter()
                .filter(|(at, _)| *at != place(2, "a"))
                .count(),
            AT_ONCE
        );
        assert_eq!(running.len(), AT_ONCE + 1);
        lanes.done(&running[0].0);
        assert_eq!(
            lanes.next().map(|(place, _)| place.id),
            Some(AT_ONCE.to_string())
        );
        let lane = &lanes.lanes[&place(1, "").endpoint];
        assert_eq!(lane.waiting["open"].1, Wanted::Close);
        lanes.discard(place(1, "").endpoint);
        let left = &lanes.lanes[&place(1, "").endpoint];
        assert_eq!(
            (left.waiting.len(), left.order.len(), left.running.len()),
            (0, 0, AT_ONCE)
        );
    }
}
