//! Limits of the session store.
//!
//! Decision 0040.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Maximum length of a session or tenant id, in bytes.
pub(super) const MAX_ID_LENGTH: usize = 256;

/// Limits of the session store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRules {
    /// Time that a session is retained after its last request ended.
    pub ttl: Duration,
    /// Maximum number of sessions. At the limit the least recently used one is removed.
    pub max_sessions: usize,
    /// Maximum number of sessions of one tenant. At the limit the least recently used session of
    /// the tenant is removed.
    pub max_sessions_per_tenant: usize,
}

impl SessionRules {
    /// Valid range of `ttl`.
    pub const TTL: RangeInclusive<Duration> =
        Duration::from_secs(1)..=Duration::from_secs(31_536_000);

    /// Checks the ranges. Returns the name of the invalid rule and the problem.
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
            ("max_sessions", self.max_sessions),
            ("max_sessions_per_tenant", self.max_sessions_per_tenant),
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
            max_sessions: 65_536,
            max_sessions_per_tenant: 16_384,
        }
    }
}

/// Reason why a request has no session. It is then routed by cost alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The id is empty or too long.
    #[error("the session id has {bytes} bytes, but may have 1 to {MAX_ID_LENGTH}")]
    IdLength {
        /// Length of the id.
        bytes: usize,
    },
    /// The tenant is at its limit, and all of its sessions have running requests.
    #[error("the limit of {limit} sessions of one tenant is reached, and all of them are in use")]
    TenantFull {
        /// The limit.
        limit: usize,
    },
    /// The limit on sessions is reached, and all of them have running requests.
    #[error("the limit of {limit} sessions is reached, and all of them are in use")]
    Full {
        /// The limit.
        limit: usize,
    },
}
