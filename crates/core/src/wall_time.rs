//! Wall-clock times on status pages.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};

/// Wall-clock time, written as RFC 3339 in UTC with milliseconds. Times before 1970 count as the
/// start of 1970, and times after 9999 as the end of 9999.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WallTime(SystemTime);

impl WallTime {
    /// Seconds from 1970 to the last second of 9999, the last one that RFC 3339 can express.
    const MAX_SECONDS: u64 = 253_402_300_799;

    /// Creates a time from seconds of Unix time.
    pub fn from_unix_seconds(seconds: f64) -> Self {
        let since = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        Self(UNIX_EPOCH + since.min(Duration::from_secs(Self::MAX_SECONDS)))
    }

    /// Returns the time of day in UTC, as `HH:MM:SS`.
    pub fn time_of_day(self) -> String {
        let text = self.to_string();
        text.get(11..19).unwrap_or_default().to_owned()
    }

    /// Returns the seconds of Unix time.
    pub fn as_unix_seconds(self) -> f64 {
        self.0
            .duration_since(UNIX_EPOCH)
            .map_or(0.0, |since| since.as_secs_f64())
    }
}

impl Default for WallTime {
    fn default() -> Self {
        Self(UNIX_EPOCH)
    }
}

impl From<SystemTime> for WallTime {
    fn from(time: SystemTime) -> Self {
        let last = UNIX_EPOCH + Duration::from_secs(Self::MAX_SECONDS);
        Self(time.clamp(UNIX_EPOCH, last))
    }
}

impl fmt::Display for WallTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_rfc3339_millis(self.0).fmt(f)
    }
}

impl Serialize for WallTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_day_has_seconds() {
        let time = WallTime::from_unix_seconds(86_400.0 + 3_661.5);
        assert_eq!(time.time_of_day(), "01:01:01");
    }

    #[test]
    fn time_is_written_as_rfc_3339() {
        for (seconds, text) in [
            (0.0, "1970-01-01T00:00:00.000Z"),
            (1_795_398_189.91, "2026-11-23T01:43:09.910Z"),
            (-5.0, "1970-01-01T00:00:00.000Z"),
            (f64::NAN, "1970-01-01T00:00:00.000Z"),
            (f64::INFINITY, "9999-12-31T23:59:59.000Z"),
        ] {
            let time = WallTime::from_unix_seconds(seconds);
            assert_eq!(time.to_string(), text);
            assert_eq!(serde_json::to_value(time).unwrap(), text);
        }
        let late = UNIX_EPOCH + Duration::from_secs(WallTime::MAX_SECONDS + 10);
        assert_eq!(WallTime::from(late).to_string(), "9999-12-31T23:59:59.000Z");
        let early = UNIX_EPOCH - Duration::from_secs(10);
        assert_eq!(WallTime::from(early), WallTime::default());
    }
}
