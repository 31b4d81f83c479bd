//! `sessions.engine:`: sessions on engines.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{DurationSetting, Problem};

/// Section `sessions.engine:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EngineSessionsConfig {
    /// Engine with session endpoints.
    pub kind: SessionEngineKind,
    /// `capacity_of_str_len` of the open call: maximum number of characters in a session.
    #[serde(default = "capacity")]
    pub capacity: u64,
    /// Opens streaming sessions, whose cache is retained between turns.
    #[serde(default)]
    pub streaming: bool,
    /// Idle time after which the engine closes a session by itself, in case the close call is lost.
    #[serde(default)]
    pub idle_timeout: Option<DurationSetting>,
    /// Maximum duration of a call.
    #[serde(default = "timeout")]
    pub timeout: DurationSetting,
}

/// Engine with session endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SessionEngineKind {
    /// `POST /open_session` and `POST /close_session` at the worker's endpoint.
    Sglang,
}

fn capacity() -> u64 {
    65_536
}

fn timeout() -> DurationSetting {
    DurationSetting::seconds(1)
}

impl EngineSessionsConfig {
    /// Returns semantic errors of the configuration. `ttl` is the lifetime of an idle session.
    pub fn problems(&self, ttl: DurationSetting) -> Vec<Problem> {
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
        if let Some(idle) = self.idle_timeout.filter(|idle| *idle < ttl) {
            let text = format!(
                "{idle} is less than `sessions.ttl` ({ttl}), so engines would close sessions that \
                are still in use; give at least as much, or leave it out"
            );
            problems.push(Problem::of("idle_timeout", text));
        }
        problems
    }
}
