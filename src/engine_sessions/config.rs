//! `sessions.engine:`: whether engines are told of sessions.

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem};

/// `sessions.engine:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineSessionsConfig {
    /// What the engines are.
    pub kind: EngineKind,
    /// Most characters of a session, as the engine is told when one is opened.
    #[serde(default = "capacity")]
    pub capacity: u64,
    /// Whether sessions are opened as streaming ones, which keep their cache between turns.
    #[serde(default)]
    pub streaming: bool,
    /// After so long without a request the engine closes a session by itself, should we never come to do it.
    #[serde(default)]
    pub idle: Option<Period>,
    /// How long one call may take.
    #[serde(default = "timeout")]
    pub timeout: Period,
}

/// Whose session endpoints are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// `POST /open_session` and `POST /close_session` at the worker's endpoint.
    Sglang,
}

fn capacity() -> u64 {
    65_536
}

fn timeout() -> Period {
    Period::seconds(1)
}

impl EngineSessionsConfig {
    /// The usual limits.
    pub fn of(kind: EngineKind) -> Self {
        Self {
            kind,
            capacity: capacity(),
            streaming: false,
            idle: None,
            timeout: timeout(),
        }
    }

    /// Mistakes of meaning; `ttl` is how long we remember a session.
    pub fn problems(&self, ttl: Period) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.capacity == 0 {
            problems.push(Problem::of(
                "capacity",
                "no session would fit a capacity of 0; the default is 65536",
            ));
        }
        if self.timeout.get().is_zero() {
            problems.push(Problem::of(
                "timeout",
                "no call could end within 0s; the default is 1s",
            ));
        }
        if let Some(idle) = self.idle.filter(|idle| *idle < ttl) {
            let text = format!(
                "{idle} is less than `sessions.ttl` ({ttl}), so engines would close sessions that are still sent to them; \
                 give at least as much, or leave it out"
            );
            problems.push(Problem::of("idle", text));
        }
        problems
    }
}
