//! `shared_cache:`: lookup in a cache shared by all workers. The setting
//! `routing.weights.shared_cache_multiplier` weighs its hits.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{DurationSetting, Problem};

/// Section `shared_cache:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SharedCacheConfig {
    /// URL of the lookup: `http://host:port/path`.
    pub url: String,
    /// Maximum time that a request waits for a lookup.
    #[serde(default = "timeout")]
    pub timeout: DurationSetting,
}

fn timeout() -> DurationSetting {
    DurationSetting::millis(20)
}

impl SharedCacheConfig {
    /// Returns semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let url = reqwest::Url::parse(&self.url);
        if !url.is_ok_and(|url| url.scheme() == "http" && url.has_host()) {
            let text = format!(
                "`{}` is not an http:// address; write for example http://10.0.0.7:8080/lookup",
                self.url
            );
            problems.push(Problem::of("url", text));
        }
        if self.timeout.get().is_zero() {
            problems.push(Problem::of(
                "timeout",
                "every request would time out after 0s; the default is 20ms",
            ));
        }
        problems
    }
}
