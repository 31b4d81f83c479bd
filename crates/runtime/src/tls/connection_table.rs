//! Open connections of one listener. When a limit is reached, idle connections are evicted.
//!
//! Decision 0055.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use slab::Slab;

/// Connection limits of a listener. Evicted connections do not count, but at most `total` of them
/// may wait to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Maximum number of connections.
    pub total: usize,
    /// Maximum number of connections from one IP address.
    pub per_peer: usize,
    /// Time without messages after which a connection with open streams may be evicted.
    pub idle_timeout: Duration,
}

/// Reason for closing a new connection at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionAdmissionError {
    /// All connections of the listener are active.
    TooMany,
    /// All connections of the client address are active.
    TooManyOfPeer,
}

/// Activity of one connection, reported by its task.
#[derive(Debug, Default)]
pub(super) struct ConnectionUse {
    /// Time of the last message, in milliseconds since the start of the listener.
    last: AtomicU64,
    open_streams: AtomicUsize,
    evicted: AtomicBool,
    waker: AtomicWaker,
}

impl ConnectionUse {
    fn at(now: Duration) -> Self {
        Self {
            last: AtomicU64::new(millis(now)),
            ..Self::default()
        }
    }

    /// Records a message.
    pub(super) fn on_message(&self, now: Duration) {
        self.last.store(millis(now), Ordering::Relaxed);
    }

    pub(super) fn set_open_streams(&self, count: usize) {
        self.open_streams.store(count, Ordering::Relaxed);
    }

    pub(super) fn open_streams(&self) -> usize {
        self.open_streams.load(Ordering::Relaxed)
    }

    /// Returns the time of the last message.
    pub(super) fn last(&self) -> Duration {
        Duration::from_millis(self.last.load(Ordering::Relaxed))
    }

    /// Returns ready when the connection must be closed.
    pub(super) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.register(cx.waker());
        if self.evicted.load(Ordering::Acquire) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Cancels the eviction of a connection that was used after it was selected.
    pub(super) fn withdraw_eviction(&self) {
        self.evicted.store(false, Ordering::Release);
    }

    /// Returns whether the connection may be evicted at `now`.
    pub(super) fn is_replaceable(&self, now: Duration, idle_timeout: Duration) -> bool {
        self.open_streams() == 0 || now.saturating_sub(self.last()) >= idle_timeout
    }

    pub(super) fn is_evicted(&self) -> bool {
        self.evicted.load(Ordering::Acquire)
    }

    fn evict(&self) {
        self.evicted.store(true, Ordering::Release);
        self.waker.wake();
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// An open connection.
struct ConnectionEntry {
    peer: Option<IpAddr>,
    usage: Arc<ConnectionUse>,
}

/// Open connections of a listener.
pub(super) struct ConnectionTable {
    limits: ConnectionLimits,
    entries: Slab<ConnectionEntry>,
}

/// An admitted connection.
pub(super) struct AdmittedConnection {
    pub(super) key: usize,
    pub(super) usage: Arc<ConnectionUse>,
    /// True if another connection was evicted for it.
    pub(super) has_evicted: bool,
}

impl ConnectionTable {
    pub(super) fn new(limits: ConnectionLimits) -> Self {
        Self {
            limits,
            entries: Slab::new(),
        }
    }

    /// Admits a connection. At a limit, it evicts the connection that has been idle for the longest
    /// time. If the client address is at its limit, it evicts a connection of that address.
    pub(super) fn admit(
        &mut self,
        peer: Option<IpAddr>,
        now: Duration,
    ) -> Result<AdmittedConnection, ConnectionAdmissionError> {
        if self.entries.len() >= self.limits.total.saturating_mul(2) {
            return Err(ConnectionAdmissionError::TooMany);
        }
        let is_of_peer = |entry: &ConnectionEntry| peer.is_some() && entry.peer == peer;
        let mut total = 0;
        let mut of_peer = 0;
        for (_, entry) in self
            .entries
            .iter()
            .filter(|(_, entry)| !entry.usage.is_evicted())
        {
            total += 1;
            of_peer += usize::from(is_of_peer(entry));
        }
        let victim = if of_peer >= self.limits.per_peer {
            Some(
                self.idlest(now, is_of_peer)
                    .ok_or(ConnectionAdmissionError::TooManyOfPeer)?,
            )
        } else if total >= self.limits.total {
            Some(
                self.idlest(now, |_| true)
                    .ok_or(ConnectionAdmissionError::TooMany)?,
            )
        } else {
            None
        };
        if let Some(victim) = victim {
            victim.evict();
        }
        let has_evicted = victim.is_some();
        let usage = Arc::new(ConnectionUse::at(now));
        let key = self.entries.insert(ConnectionEntry {
            peer,
            usage: usage.clone(),
        });
        Ok(AdmittedConnection {
            key,
            usage,
            has_evicted,
        })
    }

    /// Evicts up to `count` connections that have been idle for the longest time.
    pub(super) fn evict_idlest(&self, count: usize, now: Duration) {
        for _ in 0..count {
            let Some(victim) = self.idlest(now, |_| true) else {
                return;
            };
            victim.evict();
        }
    }

    pub(super) fn remove(&mut self, key: usize) {
        self.entries.try_remove(key);
    }

    /// Returns the connection that has been idle for the longest time. Connections without open
    /// streams come first.
    fn idlest(
        &self,
        now: Duration,
        may_go: impl Fn(&ConnectionEntry) -> bool,
    ) -> Option<&ConnectionUse> {
        let candidates = self
            .entries
            .iter()
            .map(|(_, entry)| entry)
            .filter(|entry| may_go(entry));
        let candidates = candidates
            .map(|entry| &*entry.usage)
            .filter(|usage| !usage.is_evicted());
        candidates
            .filter(|usage| usage.is_replaceable(now, self.limits.idle_timeout))
            .min_by_key(|usage| (usage.open_streams() > 0, usage.last()))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const QUIET: Duration = Duration::from_secs(300);

    fn table(total: usize, per_peer: usize) -> ConnectionTable {
        ConnectionTable::new(ConnectionLimits {
            total,
            per_peer,
            idle_timeout: QUIET,
        })
    }

    fn peer(last: u8) -> Option<IpAddr> {
        Some(Ipv4Addr::new(10, 0, 0, last).into())
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn full_table_evicts_longest_idle_connection() {
        let mut table = table(3, 3);
        let [a, b, c] = [1, 2, 3].map(|n| table.admit(peer(n), at(u64::from(n))).ok().unwrap());
        a.usage.on_message(at(10));
        let d = table.admit(peer(4), at(11)).ok().unwrap();
        assert_eq!(
            [&a, &b, &c, &d].map(|one| one.usage.is_evicted()),
            [false, true, false, false]
        );
        assert!(d.has_evicted);
        // The evicted connection no longer counts, although its task has not ended.
        b.usage.on_message(at(12));
        table.admit(peer(5), at(12)).ok().unwrap();
        assert!(c.usage.is_evicted() && !a.usage.is_evicted());
        table.remove(b.key);
        table.remove(c.key);
        assert_eq!(table.entries.len(), 3);
    }

    #[test]
    fn evicted_connections_are_bounded_until_they_close() {
        let mut table = table(2, 2);
        let open = [1, 2, 3, 4].map(|n| table.admit(peer(n), at(u64::from(n))).ok().unwrap());
        assert_eq!(
            open.each_ref().map(|one| one.usage.is_evicted()),
            [true, true, false, false]
        );
        assert!(matches!(
            table.admit(peer(5), at(5)),
            Err(ConnectionAdmissionError::TooMany)
        ));
        assert!(!open[2].usage.is_evicted());
        table.remove(open[0].key);
        assert!(table.admit(peer(5), at(5)).ok().unwrap().has_evicted);
        assert_eq!(table.entries.len(), 4);
    }

    #[test]
    fn connections_with_streams_stay_until_they_are_quiet() {
        let mut table = table(2, 2);
        let [a, b] = [1, 2].map(|n| table.admit(peer(n), at(u64::from(n))).ok().unwrap());
        a.usage.set_open_streams(1);
        b.usage.set_open_streams(5);
        assert!(matches!(
            table.admit(peer(3), at(100)),
            Err(ConnectionAdmissionError::TooMany)
        ));
        assert!(!a.usage.is_evicted() && !b.usage.is_evicted());
        let c = table.admit(peer(3), at(302)).ok().unwrap();
        assert!(a.usage.is_evicted() && !b.usage.is_evicted());
        // A connection without streams is evicted before one with quiet streams.
        table.admit(peer(4), at(1000)).ok().unwrap();
        assert!(c.usage.is_evicted() && !b.usage.is_evicted());
    }

    #[test]
    fn peer_beyond_its_limit_replaces_its_own_connections() {
        let mut table = table(10, 2);
        let other = table.admit(peer(1), at(0)).ok().unwrap();
        let unix = table.admit(None, at(0)).ok().unwrap();
        let [a, b] = [1, 2].map(|n| table.admit(peer(2), at(n)).ok().unwrap());
        table.admit(peer(2), at(3)).ok().unwrap();
        assert_eq!(
            [&other, &unix, &a, &b].map(|one| one.usage.is_evicted()),
            [false, false, true, false]
        );
        for _ in 0..5 {
            assert!(
                !table.admit(None, at(4)).ok().unwrap().has_evicted,
                "connections without an address have no such limit"
            );
        }
    }
}
