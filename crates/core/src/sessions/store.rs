//! Store of all sessions, and the guards of the requests that use them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::key::{SessionKey, SessionName};
use super::rules::{SessionError, SessionRules};
use super::table::{EnterStep, SessionCounts, SessionTable};
use super::updates::SessionMove;
use crate::worker::{WorkerId, WorkerRank};

/// Role of a request in its session.
#[derive(Debug)]
pub enum SessionEntry {
    /// The session is bound to a worker rank.
    Bound(SessionLease),
    /// This request decides.
    First(PendingBinding),
    /// Another request is deciding.
    Deciding(BindingWait),
}

type SessionClock = Box<dyn Fn() -> Instant + Send + Sync>;

/// Changes of bindings that a store records until they are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionRecording {
    /// Whether moves are recorded for [`SessionStore::take_moves`].
    pub moves: bool,
    /// Id of this replica, if updates are recorded for [`SessionStore::take_updates`].
    pub updates_by: Option<u64>,
}

/// Receives notifications of recorded changes. No lock is held during a call.
pub trait SessionListener: Send + Sync {
    /// Handles the notification that there are moves to take.
    fn on_moves(&self) {}

    /// Handles the notification that there are updates to take.
    fn on_updates(&self) {}
}

/// Ignores all notifications.
impl SessionListener for () {}

/// Store of all sessions.
pub struct SessionStore {
    pub(super) clock: SessionClock,
    pub(super) table: Mutex<SessionTable>,
    listener: Arc<dyn SessionListener>,
}

impl fmt::Debug for SessionStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionStore")
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

/// Reference to one session in the store.
#[derive(Clone, Debug)]
struct SessionHandle {
    sessions: Arc<SessionStore>,
    key: Arc<SessionKey>,
    /// Distinguishes the session from a later one with the same key.
    number: u64,
}

/// Lease of a running request on its session. The session is not removed while a lease exists.
#[derive(Debug)]
#[must_use = "a session without a lease may expire"]
pub struct SessionLease {
    handle: SessionHandle,
    target: WorkerRank,
}

/// Obligation of a request to bind its session to a rank. If it is dropped without a binding, the
/// next request decides.
#[derive(Debug)]
#[must_use = "dropping a pending binding leaves the decision to the next request"]
pub struct PendingBinding {
    handle: SessionHandle,
    decided: bool,
}

/// Waits for the first request of the session. The future resolves to [`SessionEntry::Bound`], or
/// to [`SessionEntry::First`] if that request gave up; never to [`SessionEntry::Deciding`].
#[derive(Debug)]
#[must_use = "waiting does nothing unless it is polled"]
pub struct BindingWait {
    /// The number is that of the waiter.
    handle: SessionHandle,
}

impl SessionStore {
    /// Creates an empty store that records no changes. The clock must be monotonic.
    pub fn new(
        rules: SessionRules,
        clock: impl Fn() -> Instant + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::with_listener(rules, clock, SessionRecording::default(), Arc::new(()))
    }

    /// Creates an empty store that records changes and reports when there are any.
    pub fn with_listener(
        rules: SessionRules,
        clock: impl Fn() -> Instant + Send + Sync + 'static,
        recording: SessionRecording,
        listener: Arc<dyn SessionListener>,
    ) -> Arc<Self> {
        Arc::new(Self {
            clock: Box::new(clock),
            table: Mutex::new(SessionTable::new(rules, recording)),
            listener,
        })
    }

    /// Enters the session of a request.
    pub fn enter(self: &Arc<Self>, name: SessionName<'_>) -> Result<SessionEntry, SessionError> {
        let now = (self.clock)();
        let (key, step, number) = self.change(|table| {
            let key = Arc::new(table.key(name)?);
            let step = table.enter(&key, now)?;
            let number = if let EnterStep::Wait = step {
                table.add_waiter()
            } else {
                0
            };
            Ok((key, step, number))
        })?;
        Ok(self.entry(key, step, number))
    }

    /// Returns the rank that a session is bound to, without entering it.
    pub fn target(&self, name: SessionName<'_>) -> Option<WorkerRank> {
        let now = (self.clock)();
        let table = self.table.lock();
        table.target(&table.key(name).ok()?, now)
    }

    /// Binds a session without a request, unless it is bound already.
    pub fn bind(self: &Arc<Self>, name: SessionName<'_>, target: WorkerRank) {
        if let Ok(SessionEntry::First(binding)) = self.enter(name) {
            drop(binding.bind(target));
        }
    }

    /// Removes expired sessions.
    pub fn expire(&self) {
        let now = (self.clock)();
        self.change(|table| table.expire(now));
    }

    /// Returns the changes of bindings since the last call, in order.
    pub fn take_moves(&self) -> Vec<SessionMove> {
        std::mem::take(&mut self.table.lock().moves.pending)
    }

    /// Unbinds sessions from workers that are not known any more. Their next request decides again.
    pub fn retain(&self, known: impl Fn(WorkerId) -> bool) {
        self.change(|table| table.retain(known));
    }

    /// Returns the size of the store.
    pub fn counts(&self) -> SessionCounts {
        self.table.lock().counts()
    }

    /// Applies `change` to the table, and notifies the listener if there is something to take.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut SessionTable) -> T) -> T {
        let mut table = self.table.lock();
        let outcome = change(&mut table);
        let has_moves = !table.moves.pending.is_empty();
        let has_updates = !table.updates.pending.is_empty();
        drop(table);
        if has_moves {
            self.listener.on_moves();
        }
        if has_updates {
            self.listener.on_updates();
        }
        outcome
    }

    fn entry(self: &Arc<Self>, key: Arc<SessionKey>, step: EnterStep, waiter: u64) -> SessionEntry {
        let handle = |number| SessionHandle {
            sessions: self.clone(),
            key,
            number,
        };
        match step {
            EnterStep::Bound { number, target } => SessionEntry::Bound(SessionLease {
                handle: handle(number),
                target,
            }),
            EnterStep::Decide { number } => SessionEntry::First(PendingBinding {
                handle: handle(number),
                decided: false,
            }),
            EnterStep::Wait => SessionEntry::Deciding(BindingWait {
                handle: handle(waiter),
            }),
        }
    }
}

impl SessionLease {
    /// Returns the rank that the session was bound to when the lease was taken.
    pub fn target(&self) -> WorkerRank {
        self.target
    }

    /// Moves the session to the rank that serves this request (soft affinity). Has no effect on the
    /// session while another request is deciding.
    pub fn rebind(&mut self, target: WorkerRank) {
        let now = (self.handle.sessions.clock)();
        self.handle
            .change(|table, key, number| table.rebind(key, number, target, now));
        self.target = target;
    }

    /// Marks this request as the last of the session, which ends when no request of it runs, unless
    /// it is used again. A group continues, because it has other members.
    pub fn finish(&self) {
        self.handle.change(SessionTable::finish);
    }
}

impl Drop for SessionLease {
    fn drop(&mut self) {
        let now = (self.handle.sessions.clock)();
        self.handle
            .change(|table, key, number| table.release(key, number, now));
    }
}

impl PendingBinding {
    /// Sets the idle time after which the engine may close the session.
    pub fn set_idle(&self, idle: Duration) {
        self.handle
            .change(|table, key, number| table.set_idle(key, number, idle));
    }

    /// Binds the session and all waiting requests to a rank.
    pub fn bind(mut self, target: WorkerRank) -> SessionLease {
        self.decided = true;
        let now = (self.handle.sessions.clock)();
        let waiters = self
            .handle
            .change(|table, key, number| table.bind(key, number, target, now));
        waiters.into_iter().for_each(Waker::wake);
        SessionLease {
            handle: self.handle.clone(),
            target,
        }
    }
}

impl Drop for PendingBinding {
    fn drop(&mut self) {
        if !self.decided {
            let now = (self.handle.sessions.clock)();
            let waiters = self
                .handle
                .change(|table, key, number| table.unbind(key, number, now));
            waiters.into_iter().for_each(Waker::wake);
        }
    }
}

impl SessionHandle {
    fn change<T>(&self, change: impl FnOnce(&mut SessionTable, &Arc<SessionKey>, u64) -> T) -> T {
        self.sessions
            .change(|table| change(table, &self.key, self.number))
    }
}

impl Future for BindingWait {
    type Output = Result<SessionEntry, SessionError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let now = (self.handle.sessions.clock)();
        // The previous waker is dropped after the lock is released, because its drop may call the
        // store.
        let (step, _previous) = self.handle.change(|table, key, waiter| {
            let step = table.enter(key, now);
            let previous = match step {
                Ok(EnterStep::Wait) => table.set_waker(key, waiter, context.waker()),
                _ => None,
            };
            (step, previous)
        });
        match step {
            Ok(EnterStep::Wait) => Poll::Pending,
            Ok(step) => {
                let SessionHandle { sessions, key, .. } = &self.handle;
                Poll::Ready(Ok(sessions.entry(key.clone(), step, 0)))
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Drop for BindingWait {
    fn drop(&mut self) {
        // The waker is dropped after the lock is released, because its drop may call the store.
        let SessionHandle {
            sessions,
            key,
            number,
        } = &self.handle;
        let waker = sessions.table.lock().remove_waiter(key, *number);
        drop(waker);
    }
}
