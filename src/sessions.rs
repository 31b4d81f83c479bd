//! Which worker rank a session stays with. Requests of one session go where its earlier ones went, as long as the session
//! is used; its first request decides, and others that come meanwhile wait for that decision instead of making their own.
//! What holds an entry is always a value: a hold keeps the session alive while a request runs, a binding is the duty to
//! decide, and both end by drop, so a client that leaves cannot block a session. The clock is given once, because a drop
//! cannot be told the time.

mod table;
mod tenants;
mod words;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;

use crate::worker::{WorkerId, WorkerRank};
pub use table::SessionKey;
use table::{Key, Step, Table};
pub use words::{Stamp, Use, Word};

/// What sessions may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRules {
    /// How long a session is remembered after its last request ended.
    pub ttl: Duration,
    /// How many are remembered at most; then the one not used for longest is forgotten.
    pub most_sessions: usize,
    /// Most sessions of one tenant. At the limit the least recently used session of the tenant is removed.
    pub most_sessions_per_tenant: usize,
    /// Longest id, in bytes, of a session or a tenant.
    pub longest_id: usize,
}

impl SessionRules {
    /// The shortest and the longest time that can be asked for.
    pub const TTL: std::ops::RangeInclusive<Duration> =
        Duration::from_secs(1)..=Duration::from_secs(31_536_000);

    /// Refuses values outside their range: the name of the rule and what is wrong with it.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        if !Self::TTL.contains(&self.ttl) {
            return Err((
                "ttl",
                format!(
                    "is {:?}, but must be from 1 s to 31,536,000 s (a year)",
                    self.ttl
                ),
            ));
        }
        let positive = [
            ("most_sessions", self.most_sessions),
            ("most_sessions_per_tenant", self.most_sessions_per_tenant),
            ("longest_id", self.longest_id),
        ];
        match positive.into_iter().find(|(_, value)| *value == 0) {
            Some((name, _)) => Err((name, "is 0, but must be at least 1".to_owned())),
            None => Ok(()),
        }
    }
}

impl Default for SessionRules {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(600),
            most_sessions: 65_536,
            most_sessions_per_tenant: 16_384,
            longest_id: 256,
        }
    }
}

/// What a request says of its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionName<'a> {
    /// Its id.
    pub id: &'a str,
    /// The session it was started by. All that have the same parent are one group and stay together.
    pub parent: Option<&'a str>,
    /// The model it is for: sessions of different models are different ones, whatever clients call them.
    pub model: Option<&'a str>,
    /// The tenant of the client, if `clients.tenant_header` is set. A tenant cannot use or close the sessions of another.
    pub tenant: Option<&'a str>,
}

/// Why a request has no session. It is routed all the same, by cost alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The id is empty or too long.
    #[error("the session id has {bytes} bytes, but may have 1 to {most}")]
    IdLength {
        /// Its length.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// The tenant is at its limit, and all of its sessions have running requests.
    #[error("the limit of {most} sessions of one tenant is reached, and all of them are in use")]
    TenantFull {
        /// The limit.
        most: usize,
    },
    /// No more sessions are remembered, and requests of all of them run.
    #[error("the limit of {most} sessions is reached, and all of them are in use")]
    Full {
        /// The limit.
        most: usize,
    },
}

/// Where a request stands in its session.
#[derive(Debug)]
pub enum Entry {
    /// The session has a worker rank.
    Bound(Hold),
    /// This request decides.
    First(Binding),
    /// Another request is deciding.
    Wait(Waiting),
}

/// How much there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Sessions that are remembered.
    pub sessions: usize,
    /// Requests that keep one alive.
    pub running: usize,
    /// Requests that wait for the first of their session.
    pub waiting: usize,
}

/// A session at a worker rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stay {
    /// The id, or the parent's where it is a group.
    pub id: String,
    /// Whether it is a group.
    pub group: bool,
    /// The tenant of the session, if `clients.tenant_header` is set.
    pub tenant: Option<Arc<str>>,
    /// Where.
    pub target: WorkerRank,
    /// The idle time after which the engine may close it, if the client set one.
    pub idle: Option<Duration>,
}

/// A move of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moved {
    /// It was bound there.
    Came(Stay),
    /// It ended, or went to another worker rank.
    Left(Stay),
    /// It is where it was, but bound by another router, which sees to its end from now on.
    HandedOver(Stay),
    /// It is where another router has bound it that is gone.
    Inherited(Stay),
}

type Clock = Box<dyn Fn() -> Instant + Send + Sync>;
type Hear = Box<dyn Fn() + Send + Sync>;

/// All sessions.
pub struct Sessions {
    clock: Clock,
    table: Mutex<Table>,
    hear: OnceLock<Hear>,
    hear_words: OnceLock<Hear>,
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

/// One place in the table.
#[derive(Clone, Debug)]
struct Seat {
    sessions: Arc<Sessions>,
    key: Arc<Key>,
    /// Tells a session from a later one of the same name.
    number: u64,
}

/// A request that runs in a session; while it lives, the session is not forgotten.
#[derive(Debug)]
#[must_use = "a session whose hold is dropped may expire"]
pub struct Hold {
    seat: Seat,
    target: WorkerRank,
}

/// The duty to decide where a session goes. When it is dropped undecided, the next request decides.
#[derive(Debug)]
#[must_use = "dropping a binding leaves the decision to the next request"]
pub struct Binding {
    seat: Seat,
    decided: bool,
}

/// A request that waits for the first of its session. As a future it is ready with [`Entry::Bound`], or with
/// [`Entry::First`] where the first has given up; never with [`Entry::Wait`].
#[derive(Debug)]
#[must_use = "waiting does nothing unless it is polled"]
pub struct Waiting {
    sessions: Arc<Sessions>,
    key: Arc<Key>,
    number: u64,
}

impl Sessions {
    /// No session. The clock must not go backwards.
    pub fn new(
        rules: SessionRules,
        clock: impl Fn() -> Instant + Send + Sync + 'static,
    ) -> Arc<Self> {
        let table = Mutex::new(Table::new(rules));
        Arc::new(Self {
            clock: Box::new(clock),
            table,
            hear: OnceLock::new(),
            hear_words: OnceLock::new(),
        })
    }

    /// A request of a session arrives.
    pub fn enter(self: &Arc<Self>, name: SessionName<'_>) -> Result<Entry, Refused> {
        let now = (self.clock)();
        let (key, step, number) = self.change(|table| {
            let key = Arc::new(table.key(name)?);
            let step = table.enter(&key, now)?;
            let number = if let Step::Wait = step {
                table.wait()
            } else {
                0
            };
            Ok((key, step, number))
        })?;
        Ok(self.entry(key, step, number))
    }

    /// Where a session is bound, without entering it.
    pub fn target(&self, name: SessionName<'_>) -> Option<WorkerRank> {
        let now = (self.clock)();
        let table = self.table.lock();
        table.target(&table.key(name).ok()?, now)
    }

    /// Forgets what has not been used for too long.
    pub fn expire(&self) {
        let now = (self.clock)();
        self.change(|table| table.expire(now));
    }

    /// From now on notes the moves for [`Sessions::moves`], and calls `hear` whenever there are some, with no lock of ours
    /// held. Who called first is the one who hears.
    pub fn on_move(&self, hear: impl Fn() + Send + Sync + 'static) {
        if self.hear.set(Box::new(hear)).is_ok() {
            self.table.lock().note_moves();
        }
    }

    /// The moves since the last call, in their order.
    pub fn moves(&self) -> Vec<Moved> {
        self.table.lock().take_moves()
    }

    /// Forgets the targets on workers that left; their sessions are decided anew.
    pub fn retain(&self, known: impl Fn(WorkerId) -> bool) {
        self.change(|table| table.retain(known));
    }

    /// How much there is.
    pub fn counts(&self) -> Counts {
        self.table.lock().counts()
    }

    /// Changes the table, and tells who listens if something moved.
    fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = self.table.lock();
        let outcome = change(&mut table);
        let (moved, has_words) = (table.has_moved(), table.has_words());
        drop(table);
        if let Some(hear) = self.hear.get().filter(|_| moved) {
            hear();
        }
        if let Some(hear) = self.hear_words.get().filter(|_| has_words) {
            hear();
        }
        outcome
    }

    fn entry(self: &Arc<Self>, key: Arc<Key>, step: Step, waiter: u64) -> Entry {
        let sessions = self.clone();
        match step {
            Step::Bound { number, target } => Entry::Bound(Hold {
                seat: Seat {
                    sessions,
                    key,
                    number,
                },
                target,
            }),
            Step::First { number } => Entry::First(Binding {
                seat: Seat {
                    sessions,
                    key,
                    number,
                },
                decided: false,
            }),
            Step::Wait => Entry::Wait(Waiting {
                sessions,
                key,
                number: waiter,
            }),
        }
    }
}

impl Hold {
    /// The worker rank the session was bound to when this was given out.
    pub fn target(&self) -> WorkerRank {
        self.target
    }

    /// This request goes somewhere else and takes the session with it: soft affinity. While another request decides
    /// anew, that one's word counts.
    pub fn rebind(&mut self, target: WorkerRank) {
        let now = (self.seat.sessions.clock)();
        self.seat
            .change(|table, key, number| table.rebind(key, number, target, now));
        self.target = target;
    }

    /// This is the last request of the session: it is forgotten as soon as nothing of it runs, unless it is used again.
    /// A group goes on, because it has other members.
    pub fn finish(&self) {
        self.seat.change(Table::finish);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let now = (self.seat.sessions.clock)();
        self.seat
            .change(|table, key, number| table.release(key, number, now));
    }
}

impl Binding {
    /// Sets the time without a request after which the engine may close the session.
    pub fn set_idle(&self, idle: Duration) {
        self.seat
            .change(|table, key, number| table.set_idle(key, number, idle));
    }

    /// The session goes there, with all that wait for it.
    pub fn bind(mut self, target: WorkerRank) -> Hold {
        self.decided = true;
        let now = (self.seat.sessions.clock)();
        let waiters = self
            .seat
            .change(|table, key, number| table.bind(key, number, target, now));
        waiters.into_iter().for_each(Waker::wake);
        Hold {
            seat: self.seat.clone(),
            target,
        }
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        if !self.decided {
            let now = (self.seat.sessions.clock)();
            let waiters = self
                .seat
                .change(|table, key, number| table.unbind(key, number, now));
            waiters.into_iter().for_each(Waker::wake);
        }
    }
}

impl Seat {
    fn change<T>(&self, change: impl FnOnce(&mut Table, &Arc<Key>, u64) -> T) -> T {
        self.sessions
            .change(|table| change(table, &self.key, self.number))
    }
}

impl Future for Waiting {
    type Output = Result<Entry, Refused>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let now = (self.sessions.clock)();
        // The former waker is dropped with the table free, because whose it is may come back here.
        let (step, _former) = self
            .sessions
            .change(|table| match table.enter(&self.key, now) {
                Ok(Step::Wait) => (
                    Ok(Step::Wait),
                    table.listen(&self.key, self.number, context.waker()),
                ),
                step => (step, None),
            });
        match step {
            Ok(Step::Wait) => Poll::Pending,
            Ok(step) => Poll::Ready(Ok(self.sessions.entry(self.key.clone(), step, 0))),
            Err(refused) => Poll::Ready(Err(refused)),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Whose waker is dropped may come back here, so the table must be free by then.
        let former = self.sessions.table.lock().leave(&self.key, self.number);
        drop(former);
    }
}

#[cfg(test)]
mod tests;
