//! `shared_cache:`: where a cache shared by all workers is asked. What a hit is worth is `schedule.shared_cache_multiplier`.

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem, Size};

/// Where and how long is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedCacheConfig {
    /// `http://host:port/path` of the lookup.
    pub url: String,
    /// How long a request waits for the answer.
    #[serde(default = "timeout")]
    pub timeout: Period,
    /// Lookups under way at once; further requests go without.
    #[serde(default = "in_flight")]
    pub in_flight: u32,
    /// Longest answer that is read.
    #[serde(default = "answer")]
    pub answer: Size,
}

fn timeout() -> Period {
    Period::millis(20)
}

fn in_flight() -> u32 {
    64
}

fn answer() -> Size {
    Size::kib(64)
}

impl SharedCacheConfig {
    /// The usual limits with this address.
    pub fn at(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            timeout: timeout(),
            in_flight: in_flight(),
            answer: answer(),
        }
    }

    /// Mistakes of meaning.
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
                "no answer could come within 0s; the default is 20ms",
            ));
        }
        if self.in_flight == 0 {
            let text = "no lookup would ever be made; the default is 64, and without this section nothing is asked";
            problems.push(Problem::of("in_flight", text));
        }
        if self.answer.0 == 0 {
            problems.push(Problem::of(
                "answer",
                "no answer fits a limit of 0; the default is 64KiB",
            ));
        }
        problems
    }
}
