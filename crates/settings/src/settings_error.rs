//! Deserialization errors of settings, and their messages for the user.

use std::fmt;
use std::net::Ipv4Addr;
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};

use serde::de::{self, Unexpected};

use super::reader::ValuePath;
use super::{SourcePosition, nearest};

/// Deserialization error. The reader of the innermost value adds its position.
#[derive(Debug)]
pub(super) struct SettingsError {
    pub(super) kind: SettingsErrorKind,
    pub(super) located: bool,
    pub(super) position: SourcePosition,
    pub(super) path: ValuePath,
    pub(super) name: Box<str>,
}

/// Kinds of [`SettingsError`].
#[derive(Debug)]
pub(super) enum SettingsErrorKind {
    /// A required key is missing.
    Missing(&'static str),
    /// A key is unknown. `meant` is the known key that it probably stands for.
    Unknown {
        key: Box<str>,
        known: &'static [&'static str],
        meant: Option<&'static str>,
    },
    /// A value of the wrong type. The message is "`key`" followed by this text.
    WrongType(String),
    /// A value that its own deserializer rejects, with that error.
    Rejected(String),
}

impl SettingsError {
    fn new(kind: SettingsErrorKind) -> Self {
        Self {
            kind,
            located: false,
            position: SourcePosition::default(),
            path: ValuePath::new(),
            name: Box::default(),
        }
    }

    /// Returns true if the message should list the known keys of the map.
    pub(super) fn lists_keys(&self) -> bool {
        match &self.kind {
            SettingsErrorKind::Unknown {
                key, meant: None, ..
            } => self.hint_for_key(key).is_none(),
            _ => false,
        }
    }

    /// Returns true if the error concerns a value, not a key.
    pub(super) fn concerns_value(&self) -> bool {
        matches!(
            self.kind,
            SettingsErrorKind::WrongType(_) | SettingsErrorKind::Rejected(_)
        )
    }

    /// Returns the message for the user. With `lists_keys`, the message for an unknown key lists
    /// the known ones.
    pub(super) fn message(&self, lists_keys: bool) -> String {
        let name = if self.name.is_empty() {
            "the file".to_owned()
        } else {
            format!("`{}`", self.name)
        };
        match &self.kind {
            SettingsErrorKind::Missing(key) if self.name.is_empty() => {
                format!("the required key `{key}` is missing")
            }
            SettingsErrorKind::Missing(key) => {
                format!("the required key `{key}` is missing in {name}")
            }
            SettingsErrorKind::Unknown { key, known, meant } => {
                match (self.hint_for_key(key), meant) {
                    (Some(hint), _) => format!("unknown key `{key}`; {hint}"),
                    (None, Some(meant)) => format!("unknown key `{key}`; did you mean `{meant}`?"),
                    (None, None) if lists_keys => {
                        format!(
                            "unknown key `{key}` in {name}; known keys: {}",
                            known.join(", ")
                        )
                    }
                    (None, None) => format!("unknown key `{key}` in {name}"),
                }
            }
            SettingsErrorKind::WrongType(text)
                if &*self.name == "headers" && text.starts_with("must be an API") =>
            {
                format!("{name} {text}; `path_headers` lists headers")
            }
            SettingsErrorKind::WrongType(text) => format!("{name} {text}"),
            SettingsErrorKind::Rejected(text) => format!("{name}: {text}"),
        }
    }

    /// Returns a hint for a removed key, or for a frequent mistake.
    fn hint_for_key(&self, key: &str) -> Option<&'static str> {
        let section = self.name.split('[').next().unwrap_or_default();
        match (section, key) {
            ("", "metrics") => Some("`listeners.admin` serves the metrics at /metrics"),
            ("workers", "file_watch")
            | ("reload", "poll_interval" | "debounce")
            | ("remote_tokenizer", "hedge_delay" | "max_consecutive_failures" | "cooldown")
            | ("load", "max_scrapes_per_second" | "timeout")
            | ("parity_check", "event_delay")
            | ("api", "max_bookings" | "max_prompt_blocks" | "max_booked_blocks")
            | ("sessions", "max_id_length")
            | ("replicas", "batch_interval")
            | ("shared_cache", "max_response_size" | "max_concurrency")
            | ("remote", "hedge_delay" | "max_concurrency")
            | ("kubernetes", "labels")
            | ("warm_start", "max_snapshot_age")
            | ("outlier_detection", "base_ejection_time" | "max_ejection_time") => {
                Some("it was removed, and its default applies")
            }
            ("classes", "prefill_busy_threshold" | "prefill_busy_threshold_frac") => {
                Some("it was removed, and that of the queue applies")
            }
            ("" | "list" | "worker", "block_size") => {
                Some("it was removed, and that of the model applies")
            }
            ("limits", "max_concurrent_streams") => {
                Some("it was removed; `max_streams` limits the streams of all connections")
            }
            ("header_names", "data_parallel_rank") => {
                Some("it was removed; `dp_rank` names the header of the rank")
            }
            ("worker", "data_parallel_size") => Some("write `data_parallel: {size: ..}`"),
            ("worker", "bootstrap_port") => Some("write `bootstrap: {port: ..}`"),
            ("image", "patch_size" | "merge_size" | "min_pixels" | "max_pixels") => {
                Some("it was removed; `preprocessor_config` names the file that has it")
            }
            ("image" | "audio" | "video", "token_count") => {
                Some("it was removed; write `tokens_per_item`, or `preprocessor_config` for images")
            }
            _ => None,
        }
    }
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message(true))
    }
}

impl std::error::Error for SettingsError {}

impl de::Error for SettingsError {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::new(SettingsErrorKind::Rejected(text.to_string()))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        let expected = expected.to_string();
        if expected == "socket address"
            && let Unexpected::Unsigned(port) = found
        {
            return Self::new(SettingsErrorKind::WrongType(format!(
                "must be an address and a port, not {port}; write 127.0.0.1:{port}, or \
                0.0.0.0:{port} for all addresses"
            )));
        }
        let is_quoted = matches!(found, Unexpected::Str(text) if is_quoted_value(text, &expected));
        let expected = describe_expected(&expected);
        if matches!(found, Unexpected::Unit | Unexpected::Option) {
            return Self::new(SettingsErrorKind::WrongType(format!(
                "has no value; it must be {expected}"
            )));
        }
        let fix = match found {
            Unexpected::Str(_) if is_quoted => "; remove the quotes",
            Unexpected::Seq | Unexpected::Map => "",
            _ if expected == "text" => "; put it in quotes",
            _ => "",
        };
        Self::new(SettingsErrorKind::WrongType(format!(
            "must be {expected}, not {}{fix}",
            describe_found(found)
        )))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(SettingsErrorKind::WrongType(format!(
            "must be {}, not {}",
            describe_expected(&expected.to_string()),
            describe_found(found)
        )))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let meant = nearest(variant, expected.iter().copied());
        let hint = meant.map_or(String::new(), |meant| format!("; did you mean `{meant}`?"));
        Self::new(SettingsErrorKind::WrongType(format!(
            "must be one of {}, not `{variant}`{hint}",
            expected.join(", ")
        )))
    }

    fn unknown_field(key: &str, expected: &'static [&'static str]) -> Self {
        let meant = nearest(key, expected.iter().copied());
        Self::new(SettingsErrorKind::Unknown {
            key: key.into(),
            known: expected,
            meant,
        })
    }

    fn missing_field(key: &'static str) -> Self {
        Self::new(SettingsErrorKind::Missing(key))
    }
}

/// Converts Serde's description of an expected type to words for users.
fn describe_expected(expected: &str) -> String {
    match expected {
        "u8" => format!("a whole number from 0 to {}", u8::MAX),
        "u16" => format!("a whole number from 0 to {}", u16::MAX),
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "u64" | "usize" => format!("a whole number from 0 to {}", u64::MAX),
        "a string" | "path string" | "socket address" => "text".to_owned(),
        "f64" | "f32" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        nonzero if nonzero.starts_with("a nonzero ") => "a whole number from 1".to_owned(),
        composite if composite.starts_with("struct ") => "a map of keys".to_owned(),
        name if name.starts_with("enum ") => "a name".to_owned(),
        other => other.to_owned(),
    }
}

/// Returns true if a text would be a value of Serde's expected type without its quotes.
fn is_quoted_value(text: &str, expected: &str) -> bool {
    fn is<T: std::str::FromStr>(text: &str) -> bool {
        text.parse::<T>().is_ok()
    }
    match expected {
        "a boolean" => is::<bool>(text),
        "f32" | "f64" => is::<f64>(text),
        "u8" => is::<u8>(text),
        "u16" => is::<u16>(text),
        "u32" => is::<u32>(text),
        "u64" | "usize" => is::<u64>(text),
        "a nonzero u16" => is::<NonZeroU16>(text),
        "a nonzero u32" => is::<NonZeroU32>(text),
        "a nonzero u64" | "a nonzero usize" => is::<NonZeroU64>(text),
        _ => false,
    }
}

fn describe_found(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => format!("{value}"),
        Unexpected::Unsigned(value) => format!("{value}"),
        Unexpected::Signed(value) => format!("{value}"),
        Unexpected::Float(value) => format!("{value}"),
        Unexpected::Str(value) => format!("`{value}`"),
        Unexpected::Unit | Unexpected::Option => "empty".to_owned(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a map of keys".to_owned(),
        other => other.to_string(),
    }
}

/// Returns the error text for a value that is not an address with a port.
pub(super) fn describe_address(given: &str, key: &str) -> String {
    if let Some((scheme, rest)) = given.split_once("://") {
        let hint = if key == "endpoint" {
            "; `engines.http.scheme` selects https"
        } else {
            ""
        };
        return format!("`{given}` is not an IP:PORT; remove `{scheme}://` and write {rest}{hint}");
    }
    if let Ok(port) = given.strip_prefix(':').unwrap_or(given).parse::<u16>() {
        return format!(
            "`{given}` has no address; write 127.0.0.1:{port}, or 0.0.0.0:{port} for all addresses"
        );
    }
    if given.parse::<Ipv4Addr>().is_ok() {
        return format!("`{given}` has no port; write for example {given}:8000");
    }
    let example = "write for example 10.0.0.5:8000, or \"[fd00::5]:8000\" in quotes";
    match given.rsplit_once(':') {
        Some(("localhost", port)) if port.parse::<u16>().is_ok() => {
            format!("`{given}` has a host name instead of an IP address; write 127.0.0.1:{port}")
        }
        Some((name, port)) if is_host_name(name) && port.parse::<u16>().is_ok() => {
            let fix = if key == "endpoint" {
                "; to find workers by name, use `workers.dns` or `workers.kubernetes`"
            } else {
                ""
            };
            format!("`{given}` has a host name instead of an IP address{fix}")
        }
        Some((_, port))
            if port
                .parse::<u32>()
                .is_ok_and(|port| port > u32::from(u16::MAX)) =>
        {
            format!(
                "`{given}` has the port {port}, but ports end at {}",
                u16::MAX
            )
        }
        _ => format!("`{given}` is not an IP:PORT; {example}"),
    }
}

/// Returns true for the name of a host, in contrast to an address.
fn is_host_name(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}
