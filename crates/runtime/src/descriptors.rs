//! File descriptors of the process: the limit, the connections that fit into it, and a reserve for
//! the health and admin listeners.

use std::fs::File;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Number of descriptors besides connections: logs, watches, tokenizers, listeners.
const BASE_DESCRIPTORS: u64 = 128;
/// Number of descriptors per rank: events, replay, and a request to the engine.
const DESCRIPTORS_PER_RANK: u64 = 3;
/// Minimum number of connections of a listener, even if the limit is too low for them.
const MIN_CONNECTIONS: u64 = 16;
/// Number of descriptors in the reserve. Probes are short and come one at a time.
const RESERVED_DESCRIPTORS: usize = 16;

/// Raises the soft limit of the process to its hard limit. Returns the resulting limit, or `None`
/// if there is none.
///
/// Service managers and shells often start processes with a soft limit of 1024, for programs that
/// use `select`.
pub fn raise_limit() -> Option<u64> {
    let limits = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limits.maximum,
        maximum: limits.maximum,
    };
    // Some systems reject a hard limit as the soft limit. The soft limit then stays as it is.
    _ = setrlimit(Resource::Nofile, raised);
    current_limit()
}

/// Returns the soft limit of the process, or `None` if there is none.
pub fn current_limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// Returns the hard limit of the process, or `None` if there is none.
pub fn hard_limit() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// Descriptors that a configuration may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorDemand {
    /// Number of listeners.
    pub listeners: u64,
    /// Maximum number of connections of each listener.
    pub max_connections: u64,
    /// Number of worker ranks.
    pub ranks: u64,
}

impl DescriptorDemand {
    /// Returns the number of descriptors that may be needed.
    pub fn total(&self) -> u64 {
        self.listeners
            .saturating_mul(self.max_connections)
            .saturating_add(self.besides_connections())
    }

    /// Returns the maximum number of connections of each listener that `limit` permits: at most
    /// `max_connections`, and at least 16.
    pub fn max_connections_within(&self, limit: Option<u64>) -> u64 {
        let Some(limit) = limit else {
            return self.max_connections;
        };
        let free = limit.saturating_sub(self.besides_connections());
        (free / self.listeners.max(1))
            .max(MIN_CONNECTIONS)
            .min(self.max_connections)
    }

    /// Returns the command that raises the limit, for messages.
    pub fn fix(&self) -> String {
        let raised = self.total().next_power_of_two();
        format!(
            "start warmroute with `ulimit -n {raised}` (`LimitNOFILE={raised}` in the systemd unit)"
        )
    }

    fn besides_connections(&self) -> u64 {
        BASE_DESCRIPTORS.saturating_add(self.ranks.saturating_mul(DESCRIPTORS_PER_RANK))
    }
}

/// Open descriptors that are closed when the health or admin listener cannot accept a connection. The
/// listener then accepts it with the free descriptor. Clones share one reserve.
#[derive(Clone, Default)]
pub struct DescriptorReserve {
    spare: Arc<Mutex<Vec<File>>>,
}

impl DescriptorReserve {
    /// Creates a reserve that is full, as far as the limit permits.
    pub fn new() -> Self {
        let reserve = Self::default();
        reserve.refill();
        reserve
    }

    /// Frees one descriptor. Returns false if the reserve is empty.
    pub fn release(&self) -> bool {
        self.spare.lock().pop().is_some()
    }

    /// Takes free descriptors until the reserve is full. Called after a connection was closed.
    pub fn refill(&self) {
        let mut spare = self.spare.lock();
        while spare.len() < RESERVED_DESCRIPTORS {
            match File::open("/dev/null") {
                Ok(file) => spare.push(file),
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: DescriptorDemand = DescriptorDemand {
        listeners: 4,
        max_connections: 1024,
        ranks: 100,
    };

    #[test]
    fn connections_are_scaled_to_the_limit() {
        assert_eq!(DEMAND.total(), 4 * 1024 + 3 * 100 + 128);
        let cases = [
            (None, 1024),
            (Some(1 << 20), 1024),
            (Some(DEMAND.total()), 1024),
            (Some(DEMAND.total() - 1), 1023),
            (Some(1024), (1024 - 300 - 128) / 4),
            (Some(256), 16),
        ];
        for (limit, connections) in cases {
            assert_eq!(
                DEMAND.max_connections_within(limit),
                connections,
                "{limit:?}"
            );
        }
        let few = DescriptorDemand {
            max_connections: 3,
            ..DEMAND
        };
        assert_eq!(few.max_connections_within(Some(256)), 3);
    }

    #[test]
    fn reserve_is_refilled_after_release() {
        let reserve = DescriptorReserve::new();
        let released = (0..2 * RESERVED_DESCRIPTORS)
            .filter(|_| reserve.release())
            .count();
        assert_eq!(released, RESERVED_DESCRIPTORS);
        reserve.refill();
        assert!(reserve.release());
    }
}
