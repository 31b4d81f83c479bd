//! Selection, hedging and ejection of servers. It does no I/O and reads no clock: the caller passes
//! the time of every event.

use std::time::{Duration, Instant};

/// Ejection time of a failed server, after which it is probed. It can be short, because requests do
/// not use the server before a probe succeeds.
const EJECTION_TIME: Duration = Duration::from_secs(1);

/// Number of consecutive slow queries after which a server is ejected, and the minimum time between
/// two slow queries that are counted. A single slow query is not sufficient evidence, and several
/// concurrent ones can have the same cause.
const MAX_SLOW: u32 = 3;
const SLOW_INTERVAL: Duration = Duration::from_millis(5);

/// Hedge budget that every query adds, and the maximum of the budget. If all servers are slow,
/// unlimited hedging would double their load.
const HEDGES_PER_QUERY: f64 = 0.1;
const MAX_HEDGES: f64 = 16.0;

/// All servers.
#[derive(Debug)]
pub(super) struct ServerPool {
    servers: Vec<ServerHealth>,
    /// Index of the next server in turn.
    next: usize,
    hedges: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct ServerHealth {
    /// Number of consecutive slow queries, and the time of the last counted one.
    slow_count: u32,
    last_slow: Option<Instant>,
    ejection: Option<ServerEjection>,
}

/// Ejection of a server.
#[derive(Clone, Copy, Debug)]
struct ServerEjection {
    until: Instant,
    /// Set while a probe is running.
    is_probed: bool,
}

/// A server to query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerPick {
    /// Index of the server.
    pub(super) server: usize,
    /// Set for a probe of an ejected server.
    pub(super) is_probe: bool,
}

/// Outcome of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueryOutcome {
    /// The server responded, possibly with a refusal.
    Answered,
    /// The server was unreachable, or its response was invalid.
    Failed,
    /// No response by the deadline, or a later query was faster.
    TimedOut,
    /// The query was cancelled, which is not an indication of the server's health.
    Cancelled,
}

/// A change that is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PoolChange {
    /// The server was ejected, and others are healthy.
    Ejected(usize),
    /// The server was ejected, and no other is healthy.
    AllEjected(usize),
    /// The server was readmitted.
    Readmitted(usize),
}

impl ServerPool {
    /// Creates a pool of healthy servers.
    pub(super) fn new(count: usize) -> Self {
        Self {
            servers: vec![ServerHealth::default(); count],
            next: 0,
            hedges: MAX_HEDGES,
        }
    }

    /// Picks the server of a new query; `None` if all are ejected.
    pub(super) fn pick_first(&mut self) -> Option<ServerPick> {
        self.hedges = (self.hedges + HEDGES_PER_QUERY).min(MAX_HEDGES);
        self.next_healthy(&[])
    }

    /// Picks an ejected server whose probe is due.
    pub(super) fn pick_probe(&mut self, now: Instant) -> Option<ServerPick> {
        let due = |server: &ServerHealth| {
            server
                .ejection
                .is_some_and(|ejection| !ejection.is_probed && ejection.until <= now)
        };
        let server = self.servers.iter().position(due)?;
        if let Some(ejection) = &mut self.servers[server].ejection {
            ejection.is_probed = true;
        }
        Some(ServerPick {
            server,
            is_probe: true,
        })
    }

    /// Picks a server for a hedge, because the queried ones are slow.
    pub(super) fn pick_hedge(&mut self, queried: &[ServerPick]) -> Option<ServerPick> {
        if self.hedges < 1.0 {
            return None;
        }
        let pick = self.next_healthy(queried)?;
        self.hedges -= 1.0;
        Some(pick)
    }

    /// Picks a server for a retry, because a queried one failed.
    pub(super) fn pick_retry(&mut self, queried: &[ServerPick]) -> Option<ServerPick> {
        self.next_healthy(queried)
    }

    /// Records the outcome of a query.
    pub(super) fn record_outcome(
        &mut self,
        pick: ServerPick,
        outcome: QueryOutcome,
        now: Instant,
    ) -> Option<PoolChange> {
        let server = &mut self.servers[pick.server];
        if let Some(ejection) = server.ejection.as_mut().filter(|_| pick.is_probe) {
            ejection.is_probed = false;
        }
        match outcome {
            QueryOutcome::Cancelled => None,
            QueryOutcome::Answered => {
                (server.slow_count, server.last_slow) = (0, None);
                server
                    .ejection
                    .take()
                    .map(|_| PoolChange::Readmitted(pick.server))
            }
            QueryOutcome::TimedOut
                if server
                    .last_slow
                    .is_some_and(|last| now < last + SLOW_INTERVAL) =>
            {
                None
            }
            QueryOutcome::TimedOut if !pick.is_probe && server.slow_count + 1 < MAX_SLOW => {
                (server.slow_count, server.last_slow) = (server.slow_count + 1, Some(now));
                None
            }
            QueryOutcome::TimedOut | QueryOutcome::Failed => self.eject(pick, now),
        }
    }

    /// Returns true if the server is not ejected.
    pub(super) fn is_healthy(&self, server: usize) -> bool {
        self.servers[server].ejection.is_none()
    }

    fn eject(&mut self, pick: ServerPick, now: Instant) -> Option<PoolChange> {
        let server = &mut self.servers[pick.server];
        let was_healthy = server.ejection.is_none();
        if !was_healthy && !pick.is_probe {
            // A concurrent query has already ejected the server.
            return None;
        }
        *server = ServerHealth {
            ejection: Some(ServerEjection {
                until: now + EJECTION_TIME,
                is_probed: false,
            }),
            ..ServerHealth::default()
        };
        let all = self.servers.iter().all(|server| server.ejection.is_some());
        let change = if all {
            PoolChange::AllEjected(pick.server)
        } else {
            PoolChange::Ejected(pick.server)
        };
        was_healthy.then_some(change)
    }

    /// Returns the next healthy server in turn that was not queried yet.
    fn next_healthy(&mut self, queried: &[ServerPick]) -> Option<ServerPick> {
        let count = self.servers.len();
        let is_free = |index: &usize| {
            self.servers[*index].ejection.is_none()
                && queried.iter().all(|pick| pick.server != *index)
        };
        let server = (0..count)
            .map(|step| (self.next + step) % count)
            .find(is_free)?;
        self.next = (server + 1) % count;
        Some(ServerPick {
            server,
            is_probe: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(server: usize) -> ServerPick {
        ServerPick {
            server,
            is_probe: false,
        }
    }

    fn firsts(servers: &mut ServerPool, times: usize) -> Vec<Option<usize>> {
        (0..times)
            .map(|_| servers.pick_first().map(|pick| pick.server))
            .collect()
    }

    #[test]
    fn healthy_servers_take_turns() {
        let mut servers = ServerPool::new(3);
        let now = Instant::now();
        assert_eq!(
            firsts(&mut servers, 4),
            [Some(0), Some(1), Some(2), Some(0)]
        );
        assert_eq!(
            servers.record_outcome(pick(1), QueryOutcome::Failed, now),
            Some(PoolChange::Ejected(1))
        );
        assert_eq!(firsts(&mut servers, 3), [Some(2), Some(0), Some(2)]);
        assert_eq!(ServerPool::new(0).pick_first(), None);
    }

    #[test]
    fn ejected_server_is_probed_and_readmitted() {
        let mut servers = ServerPool::new(2);
        let mut now = Instant::now();
        servers.record_outcome(pick(0), QueryOutcome::Failed, now);
        // Outcomes of other concurrent queries change nothing.
        assert_eq!(
            servers.record_outcome(pick(0), QueryOutcome::Failed, now + EJECTION_TIME / 2),
            None
        );
        for outcome in [
            QueryOutcome::TimedOut,
            QueryOutcome::Failed,
            QueryOutcome::TimedOut,
        ] {
            assert_eq!(
                servers.pick_probe(now + EJECTION_TIME - Duration::from_millis(1)),
                None
            );
            now += EJECTION_TIME;
            let probe = servers.pick_probe(now).unwrap();
            assert_eq!(
                (probe, servers.pick_probe(now)),
                (
                    ServerPick {
                        server: 0,
                        is_probe: true
                    },
                    None
                ),
                "a second probe started while one is running"
            );
            assert_eq!(
                firsts(&mut servers, 2),
                [Some(1); 2],
                "a request used an ejected server"
            );
            assert_eq!(
                servers.record_outcome(probe, outcome, now),
                None,
                "a failed probe was reported as a change"
            );
        }
        now += EJECTION_TIME;
        let cancelled = servers.pick_probe(now).unwrap();
        servers.record_outcome(cancelled, QueryOutcome::Cancelled, now);
        let again = servers.pick_probe(now).unwrap();
        assert_eq!(
            cancelled, again,
            "the probe of a cancelled query is still reserved"
        );
        assert_eq!(
            servers.record_outcome(again, QueryOutcome::Answered, now),
            Some(PoolChange::Readmitted(0))
        );
        assert!(servers.is_healthy(0));
    }

    #[test]
    fn consecutive_spaced_slow_answers_eject_server() {
        let mut servers = ServerPool::new(2);
        let mut now = Instant::now();
        let mut record_slow = |servers: &mut ServerPool, server: usize| {
            now += SLOW_INTERVAL;
            servers.record_outcome(pick(server), QueryOutcome::TimedOut, now)
        };
        for _ in 0..5 {
            record_slow(&mut servers, 0);
            record_slow(&mut servers, 0);
            servers.record_outcome(pick(0), QueryOutcome::Answered, Instant::now());
        }
        assert!(servers.is_healthy(0));
        let changes: Vec<_> = (0..3).map(|_| record_slow(&mut servers, 0)).collect();
        assert_eq!(changes, [None, None, Some(PoolChange::Ejected(0))]);
        let changes: Vec<_> = (0..3).map(|_| record_slow(&mut servers, 1)).collect();
        assert_eq!(changes, [None, None, Some(PoolChange::AllEjected(1))]);
        assert_eq!(servers.pick_first(), None);
        // Both are probed.
        let probes: Vec<_> = (0..3)
            .map(|_| {
                servers
                    .pick_probe(now + EJECTION_TIME)
                    .map(|pick| pick.server)
            })
            .collect();
        assert_eq!(probes, [Some(0), Some(1), None]);

        let mut servers = ServerPool::new(1);
        let now = Instant::now();
        for _ in 0..100 {
            servers.record_outcome(pick(0), QueryOutcome::TimedOut, now);
        }
        assert!(
            servers.is_healthy(0),
            "concurrent slow queries were counted more than once"
        );
    }

    #[test]
    fn hedges_are_limited_to_a_tenth() {
        let mut servers = ServerPool::new(2);
        let mut hedged = 0;
        for _ in 0..10_000 {
            let first = servers.pick_first().unwrap();
            hedged += usize::from(
                servers
                    .pick_hedge(&[first])
                    .is_some_and(|second| second.server != first.server),
            );
        }
        assert!((1000..=1016).contains(&hedged), "{hedged}");
    }

    #[test]
    fn no_server_receives_the_same_query_twice() {
        let mut servers = ServerPool::new(1);
        let now = Instant::now();
        let only = servers.pick_first().unwrap();
        assert_eq!(
            (servers.pick_hedge(&[only]), servers.pick_retry(&[only])),
            (None, None)
        );
        let mut servers = ServerPool::new(2);
        servers.record_outcome(pick(0), QueryOutcome::Failed, now);
        let only = servers.pick_first().unwrap();
        assert_eq!(
            (only.server, servers.pick_hedge(&[only])),
            (1, None),
            "an ejected server was picked for a hedge"
        );
    }

    #[test]
    fn retries_do_not_use_the_hedge_budget() {
        let mut servers = ServerPool::new(3);
        servers.hedges = 0.0;
        let first = servers.pick_first().unwrap();
        assert_eq!(servers.pick_hedge(&[first]), None);
        assert!(servers.pick_retry(&[first]).is_some());
    }
}
