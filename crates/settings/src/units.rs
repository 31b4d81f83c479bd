//! Durations and sizes with units, such as `250ms` and `32MiB`. They are printed in the notation in
//! which they are parsed, so a printed configuration can be loaded again.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Duration, written with its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DurationSetting(pub Duration);

impl DurationSetting {
    /// Creates a duration from milliseconds.
    pub const fn millis(millis: u64) -> Self {
        Self(Duration::from_millis(millis))
    }

    /// Creates a duration from seconds.
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// Returns the duration.
    pub fn get(self) -> Duration {
        self.0
    }
}

impl FromStr for DurationSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        humantime::parse_duration(text).map(Self).map_err(|error| {
            // The details concern a value, not the variable in its place.
            let details = if text.contains("${") {
                String::new()
            } else {
                format!(" ({error})")
            };
            format!("`{text}` is not a length of time{details}; write for example 250ms, 30s or 5m")
        })
    }
}

impl fmt::Display for DurationSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u128, &str); 6] = [
            (3_600_000_000_000, "h"),
            (60_000_000_000, "m"),
            (1_000_000_000, "s"),
            (1_000_000, "ms"),
            (1_000, "us"),
            (1, "ns"),
        ];
        let nanos = self.0.as_nanos();
        if nanos == 0 {
            return f.write_str("0s");
        }
        let (unit, name) = UNITS
            .into_iter()
            .find(|(unit, _)| nanos.is_multiple_of(*unit))
            .unwrap_or((1, "ns"));
        write!(f, "{}{name}", nanos / unit)
    }
}

/// Formats an elapsed time for logs: `120ms`, `1.2s`, `3m20s` or `2d4h`.
pub fn format_elapsed(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs();
    match seconds {
        0 => format!("{}ms", elapsed.as_millis()),
        1..60 => format!("{:.1}s", elapsed.as_secs_f64()),
        60..3_600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d{}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// Size in bytes, written with its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// Creates a size from KiB.
    pub const fn kib(kib: u64) -> Self {
        Self(kib * 1024)
    }

    /// Creates a size from MiB.
    pub const fn mib(mib: u64) -> Self {
        Self(mib * 1024 * 1024)
    }

    /// Returns the size in bytes, at most `usize::MAX`.
    pub fn bytes(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() {
            return Err(describe_missing_unit(text));
        }
        text.parse::<bytesize::ByteSize>()
            .map(|size| Self(size.as_u64()))
            .map_err(|_| format!("`{text}` is not a size; write for example 512B, 16KiB or 32MiB"))
    }
}

/// Returns the error for a number without a unit.
fn describe_missing_unit(number: impl fmt::Display) -> String {
    format!(
        "{number} has no unit; write {number}B for bytes, or for example {number}KiB or {number}MiB"
    )
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 6] = [
            (1 << 30, "GiB"),
            (1 << 20, "MiB"),
            (1 << 10, "KiB"),
            (1_000_000_000, "GB"),
            (1_000_000, "MB"),
            (1_000, "KB"),
        ];
        match UNITS
            .into_iter()
            .find(|(unit, _)| self.0 >= *unit && self.0.is_multiple_of(*unit))
        {
            Some((unit, name)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}B", self.0),
        }
    }
}

impl Serialize for DurationSetting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DurationSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DurationText;

        impl de::Visitor<'_> for DurationText {
            type Value = DurationSetting;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a length of time with its unit, for example 250ms or 30s")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<DurationSetting, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(DurationText)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeText;

        impl de::Visitor<'_> for SizeText {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size with its unit, for example 16KiB or 32MiB")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Err(E::custom(describe_missing_unit(bytes)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(SizeText)
    }
}
