//! `health:`: when a worker whose answers are errors is left alone, and for how long.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::health::HealthRules;
use crate::settings::{Period, Problem};

/// Longest time out that makes sense; beyond it a worker that was mended would be forgotten.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// `health:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HealthConfig {
    /// Failures in a row (no connection, or a 5xx other than 503) that take a worker out; 0 takes none out.
    pub failures: u32,
    /// How long it is out before one request may try it; twice as long after each failed try.
    pub first: Period,
    /// How long at most.
    pub most: Period,
}

impl Default for HealthConfig {
    fn default() -> Self {
        let HealthRules {
            failures,
            first,
            most,
        } = HealthRules::default();
        Self {
            failures,
            first: Period(first),
            most: Period(most),
        }
    }
}

impl HealthConfig {
    /// What the core is told.
    pub fn rules(&self) -> HealthRules {
        HealthRules {
            failures: self.failures,
            first: self.first.get(),
            most: self.most.get(),
        }
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.first.get().is_zero() {
            let text = "a worker that is out for 0s is never out; the default is 1s, and `failures: 0` turns this off";
            problems.push(Problem::of("first", text));
        }
        if self.most < self.first {
            let text = format!(
                "{} is less than `first` ({}); it must be at least as long",
                self.most, self.first
            );
            problems.push(Problem::of("most", text));
        }
        if self.most.get() > LONGEST {
            problems.push(Problem::of(
                "most",
                format!("{} is more than a day; the default is 60s", self.most),
            ));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_out_that_cannot_work_are_refused_by_name() {
        assert_eq!(HealthConfig::default().rules(), HealthRules::default());
        assert!(HealthConfig::default().problems().is_empty());
        for (text, key) in [
            (r#"{"first": "0s"}"#, "first"),
            (r#"{"first": "2m"}"#, "most"),
            (r#"{"most": "25h"}"#, "most"),
        ] {
            let config: HealthConfig = serde_json::from_str(text).unwrap();
            assert_eq!(config.problems().len(), 1, "{text}");
            assert_eq!(config.problems()[0].trail, [key.into()], "{text}");
        }
    }
}
