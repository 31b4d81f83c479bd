//! Rate limit of log lines that clients can cause: one line per interval for each cause.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;

/// Interval between two lines of the same cause.
const INTERVAL: Duration = Duration::from_secs(10);

/// Time of the last log line of each cause.
#[derive(Default)]
pub struct LogLimit {
    causes: Mutex<HashMap<&'static str, LoggedCause>>,
}

/// State of one cause.
struct LoggedCause {
    last: Duration,
    suppressed: u64,
}

impl LogLimit {
    /// Returns `None` if a line of this cause must be suppressed now, otherwise the number of lines
    /// suppressed since the last one.
    pub fn admit(&self, cause: &'static str, now: Duration) -> Option<u64> {
        let mut causes = self.causes.lock();
        let Some(logged) = causes.get_mut(cause) else {
            causes.insert(
                cause,
                LoggedCause {
                    last: now,
                    suppressed: 0,
                },
            );
            return Some(0);
        };
        if now.saturating_sub(logged.last) < INTERVAL {
            logged.suppressed += 1;
            return None;
        }
        logged.last = now;
        Some(std::mem::take(&mut logged.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_logged_once_per_interval() {
        let limit = LogLimit::default();
        let at = Duration::from_secs;
        assert_eq!(
            [0, 0, 9].map(|now| limit.admit("a", at(now))),
            [Some(0), None, None]
        );
        assert_eq!(limit.admit("b", at(9)), Some(0));
        assert_eq!(
            [10, 19, 20].map(|now| limit.admit("a", at(now))),
            [Some(2), None, Some(1)]
        );
    }
}
