//! `self_test:`: whether and how our tokens are compared with the engines'.

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem};

/// `self_test:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SelfTestConfig {
    /// Whether workers are asked to tokenise canaries.
    pub enabled: bool,
    /// How often.
    pub interval: Period,
    /// How long one question may take.
    pub deadline: Period,
    /// Whether the blocks of some real requests are looked for in the events of who computed them.
    pub traffic: bool,
    /// How long after the answer.
    pub grace: Period,
}

impl Default for SelfTestConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: Period::seconds(300),
            deadline: Period::seconds(5),
            traffic: true,
            grace: Period::seconds(2),
        }
    }
}

impl SelfTestConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let cases = [
            (
                "interval",
                self.interval,
                "engines would be asked without a pause; the default is 5m",
            ),
            (
                "deadline",
                self.deadline,
                "no answer could come within 0s; the default is 5s",
            ),
            (
                "grace",
                self.grace,
                "events come after the answer, not with it; the default is 2s",
            ),
        ];
        let zero = cases
            .into_iter()
            .filter(|(_, period, _)| period.get().is_zero());
        zero.map(|(key, _, text)| Problem::of(key, text)).collect()
    }
}
