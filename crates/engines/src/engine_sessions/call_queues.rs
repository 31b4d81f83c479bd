//! Queues of session calls, one per engine. Calls of one session are made in order, and only a few
//! calls to one engine run concurrently. A hanging engine neither delays other engines nor uses
//! their capacity.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use warmroute_core::worker::WorkerEndpoint;

/// Maximum number of sessions of one engine with waiting calls. Further open calls are rejected.
/// Close calls are not limited: only opened sessions are closed, so their number is bounded.
pub(super) const MAX_WAITING: usize = 4096;

/// Maximum number of concurrent calls to one engine.
pub(super) const MAX_CALLS_PER_ENGINE: usize = 8;

/// A session call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionCall {
    Open,
    Close,
}

/// A session on an engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct EngineSession {
    pub(super) endpoint: WorkerEndpoint,
    pub(super) id: String,
}

/// The waiting call of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingCall {
    Open,
    Close,
    /// Close, then open.
    Reopen,
}

#[derive(Debug, Default)]
struct EngineQueue {
    waiting: HashMap<String, (u64, PendingCall)>,
    /// Session ids in the order in which their calls were enqueued.
    order: BTreeMap<u64, String>,
    last_number: u64,
    running: HashSet<String>,
}

#[derive(Debug, Default)]
pub(super) struct CallQueues {
    engines: HashMap<WorkerEndpoint, EngineQueue>,
    /// Engines whose queue may have a call to make.
    ready: VecDeque<WorkerEndpoint>,
}

impl CallQueues {
    /// Enqueues an open call. Returns false if too many calls wait for the engine.
    pub(super) fn enqueue_open(&mut self, session: EngineSession) -> bool {
        let queue = self.engines.entry(session.endpoint).or_default();
        let many = queue.waiting.len() >= MAX_WAITING;
        match queue.waiting.get_mut(&session.id) {
            Some((_, pending @ PendingCall::Close)) => *pending = PendingCall::Reopen,
            Some(_) => {}
            None if many => return false,
            None => queue.enqueue(session.id, PendingCall::Open),
        }
        self.ready.push_back(session.endpoint);
        true
    }

    /// Enqueues a close call, or removes an open call that was never started. `is_open` is true if
    /// the engine may have the session open.
    pub(super) fn enqueue_close(&mut self, session: EngineSession, is_open: bool) {
        let queue = self.engines.entry(session.endpoint).or_default();
        match queue.waiting.get_mut(&session.id) {
            Some((_, PendingCall::Open)) if !is_open => queue.remove(&session.id),
            Some((_, pending)) => *pending = PendingCall::Close,
            None if is_open || queue.running.contains(&session.id) => {
                queue.enqueue(session.id, PendingCall::Close)
            }
            None => {}
        }
        self.ready.push_back(session.endpoint);
        self.remove_if_empty(session.endpoint);
    }

    /// Returns the next call to make. [`CallQueues::finish_call`] must follow.
    pub(super) fn next_call(&mut self) -> Option<(EngineSession, SessionCall)> {
        while let Some(endpoint) = self.ready.front().copied() {
            match self
                .engines
                .get_mut(&endpoint)
                .and_then(EngineQueue::next_call)
            {
                Some((id, call)) => return Some((EngineSession { endpoint, id }, call)),
                None => drop(self.ready.pop_front()),
            }
        }
        None
    }

    /// Records that a call has ended.
    pub(super) fn finish_call(&mut self, session: &EngineSession) {
        let Some(queue) = self.engines.get_mut(&session.endpoint) else {
            return;
        };
        queue.running.remove(&session.id);
        self.ready.push_back(session.endpoint);
        self.remove_if_empty(session.endpoint);
    }

    /// Records that all running calls have ended.
    pub(super) fn restart(&mut self) {
        for (endpoint, queue) in &mut self.engines {
            queue.running.clear();
            self.ready.push_back(*endpoint);
        }
        self.engines.retain(|_, queue| !queue.waiting.is_empty());
    }

    /// Removes the waiting call of a session, because another replica makes it.
    pub(super) fn remove(&mut self, session: &EngineSession) {
        if let Some(queue) = self.engines.get_mut(&session.endpoint) {
            queue.remove(&session.id);
        }
        self.remove_if_empty(session.endpoint);
    }

    /// Removes all waiting calls of an engine.
    pub(super) fn discard_engine(&mut self, endpoint: WorkerEndpoint) {
        if let Some(queue) = self.engines.get_mut(&endpoint) {
            queue.waiting.clear();
            queue.order.clear();
        }
        self.remove_if_empty(endpoint);
    }

    fn remove_if_empty(&mut self, endpoint: WorkerEndpoint) {
        if self
            .engines
            .get(&endpoint)
            .is_some_and(|queue| queue.running.is_empty() && queue.waiting.is_empty())
        {
            self.engines.remove(&endpoint);
        }
    }
}

impl EngineQueue {
    fn enqueue(&mut self, id: String, pending: PendingCall) {
        self.last_number += 1;
        self.order.insert(self.last_number, id.clone());
        self.waiting.insert(id, (self.last_number, pending));
    }

    fn remove(&mut self, id: &str) {
        if let Some((number, _)) = self.waiting.remove(id) {
            self.order.remove(&number);
        }
    }

    fn next_call(&mut self) -> Option<(String, SessionCall)> {
        if self.running.len() >= MAX_CALLS_PER_ENGINE {
            return None;
        }
        // A session waits at most once, so the search skips fewer ids than there are running calls.
        let id = self
            .order
            .values()
            .find(|id| !self.running.contains(*id))?
            .clone();
        self.running.insert(id.clone());
        let (_, pending) = self.waiting.get_mut(&id)?;
        let call = match pending {
            PendingCall::Open => SessionCall::Open,
            PendingCall::Close => SessionCall::Close,
            PendingCall::Reopen => {
                *pending = PendingCall::Open;
                return Some((id, SessionCall::Close));
            }
        };
        self.remove(&id);
        Some((id, call))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(port: u16, id: &str) -> EngineSession {
        EngineSession {
            endpoint: WorkerEndpoint(([127, 0, 0, 1], port).into()),
            id: id.to_owned(),
        }
    }

    #[test]
    fn calls_of_one_session_are_ordered() {
        let mut queues = CallQueues::default();
        queues.enqueue_open(session(1, "a"));
        assert_eq!(
            queues.next_call(),
            Some((session(1, "a"), SessionCall::Open))
        );
        // The open call is running, so the session may be open.
        queues.enqueue_close(session(1, "a"), false);
        queues.enqueue_open(session(1, "a"));
        queues.enqueue_open(session(1, "b"));
        queues.enqueue_open(session(2, "a"));
        let next = [queues.next_call(), queues.next_call(), queues.next_call()]
            .map(|call| call.map(|(session, _)| session));
        assert_eq!(next, [Some(session(1, "b")), Some(session(2, "a")), None]);
        queues.finish_call(&session(1, "b"));
        assert_eq!(queues.next_call(), None);
        for call in [SessionCall::Close, SessionCall::Open] {
            queues.finish_call(&session(1, "a"));
            assert_eq!(queues.next_call(), Some((session(1, "a"), call)));
            assert_eq!(queues.next_call(), None);
        }
        queues.finish_call(&session(1, "a"));
        queues.finish_call(&session(2, "a"));
        assert_eq!((queues.next_call(), queues.engines.len()), (None, 0));
    }

    #[test]
    fn session_closed_before_open_call_makes_no_call() {
        let mut queues = CallQueues::default();
        queues.enqueue_open(session(1, "a"));
        queues.enqueue_close(session(1, "a"), false);
        assert_eq!((queues.next_call(), queues.engines.len()), (None, 0));
        // The session was open before, so one close call follows, however often it was bound and
        // unbound.
        queues.enqueue_close(session(1, "a"), true);
        queues.enqueue_open(session(1, "a"));
        queues.enqueue_close(session(1, "a"), true);
        assert_eq!(
            queues.next_call(),
            Some((session(1, "a"), SessionCall::Close))
        );
        queues.finish_call(&session(1, "a"));
        assert_eq!((queues.next_call(), queues.engines.len()), (None, 0));
        queues.enqueue_close(session(1, "never opened"), false);
        assert_eq!((queues.next_call(), queues.engines.len()), (None, 0));
    }

    #[test]
    fn hanging_engine_delays_no_other_engine() {
        let mut queues = CallQueues::default();
        for nth in 0..MAX_WAITING {
            assert!(queues.enqueue_open(session(1, &nth.to_string())));
        }
        assert!(!queues.enqueue_open(session(1, "late")));
        assert!(queues.enqueue_open(session(2, "a")));
        queues.enqueue_close(session(1, "open"), true);
        let running: Vec<_> = std::iter::from_fn(|| queues.next_call()).collect();
        assert_eq!(
            running
                .iter()
                .filter(|(at, _)| *at != session(2, "a"))
                .count(),
            MAX_CALLS_PER_ENGINE
        );
        assert_eq!(running.len(), MAX_CALLS_PER_ENGINE + 1);
        queues.finish_call(&running[0].0);
        assert_eq!(
            queues.next_call().map(|(session, _)| session.id),
            Some(MAX_CALLS_PER_ENGINE.to_string())
        );
        let queue = &queues.engines[&session(1, "").endpoint];
        assert_eq!(queue.waiting["open"].1, PendingCall::Close);
        queues.discard_engine(session(1, "").endpoint);
        let left = &queues.engines[&session(1, "").endpoint];
        assert_eq!(
            (left.waiting.len(), left.order.len(), left.running.len()),
            (0, 0, MAX_CALLS_PER_ENGINE)
        );
    }
}
