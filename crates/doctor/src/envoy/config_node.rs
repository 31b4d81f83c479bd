//! Access to Envoy's configuration by paths of field names.

use std::time::Duration;

use serde_json::Value;

/// A part of Envoy's configuration in protobuf JSON: default values are omitted, 64-bit numbers are
/// strings, and durations are seconds with an `s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ConfigNode<'d>(pub(super) &'d Value);

impl<'d> ConfigNode<'d> {
    /// Returns the node at a path of field names with dots between them; null if it is absent.
    pub(super) fn at(self, path: &str) -> Self {
        Self(path.split('.').fold(self.0, |value, key| &value[key]))
    }

    /// Returns the node in a field whose name may contain dots.
    pub(super) fn field(self, name: &str) -> Self {
        Self(&self.0[name])
    }

    /// Returns the node, unless it is absent.
    pub(super) fn present(self) -> Option<Self> {
        (!self.0.is_null()).then_some(self)
    }

    /// Returns a text; empty if it is absent.
    pub(super) fn text(self, path: &str) -> &'d str {
        self.given_text(path).unwrap_or_default()
    }

    /// Returns a text, unless it is absent.
    pub(super) fn given_text(self, path: &str) -> Option<&'d str> {
        self.at(path).0.as_str()
    }

    /// Returns a flag; false if it is absent.
    pub(super) fn flag(self, path: &str) -> bool {
        self.at(path).0 == true
    }

    /// Returns a number, which may be a string.
    pub(super) fn number(self, path: &str) -> Option<u64> {
        let value = self.at(path).0;
        value.as_u64().or_else(|| value.as_str()?.parse().ok())
    }

    /// Returns a duration.
    pub(super) fn duration(self, path: &str) -> Option<Duration> {
        let seconds = self.given_text(path)?.strip_suffix('s')?.parse().ok()?;
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Returns the items of a list.
    pub(super) fn items(self, path: &str) -> impl DoubleEndedIterator<Item = Self> + use<'d> {
        let items = self.at(path).0.as_array().into_iter().flatten();
        items.map(Self)
    }

    /// Returns the texts of a list.
    pub(super) fn texts(self, path: &str) -> impl Iterator<Item = &'d str> + use<'d> {
        self.items(path).filter_map(|item| item.0.as_str())
    }

    /// Returns whether a list of texts contains `text`.
    pub(super) fn contains(self, path: &str, text: &str) -> bool {
        self.texts(path).any(|known| known == text)
    }

    /// Returns whether the node has this protobuf message type.
    pub(super) fn has_type(self, kind: &str) -> bool {
        self.text("@type").rsplit(['.', '/']).next() == Some(kind)
    }
}

/// Joins names with a comma.
pub(super) fn list(names: impl IntoIterator<Item = impl ToString>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| name.to_string()).collect();
    names.join(", ")
}

/// Returns whether a list has a header of this name.
pub(super) fn has_header(names: &[String], header: &str) -> bool {
    names.iter().any(|name| name.eq_ignore_ascii_case(header))
}
