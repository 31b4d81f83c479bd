//! Deserializer from a tree to typed settings that collects all errors. Serde stops at the first
//! error. This reader records the error, skips the invalid value and deserializes the tree again,
//! until a pass succeeds. A key that is missing only because it was skipped is not reported.

use std::collections::HashSet;
use std::path::Path;

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{self, DeserializeOwned, Deserializer, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;

use super::settings_error::{SettingsError, SettingsErrorKind, describe_address};
use super::tree::YamlKey;
use super::variables::{UnresolvedText, is_ignored_key};
use super::{SourcePosition, YamlNode, YamlValue};

/// Maximum number of reported errors. Each one costs a pass over the tree.
const MAX_ERRORS: usize = 100;

/// Expectation that serde reports for a path.
const PATH_EXPECTATION: &str = "path string";

/// Error for a path that cannot be text.
const NOT_UTF8: &str = "it is relative to the directory of this file, whose path is not valid \
    UTF-8; rename that directory, or write an absolute path";

/// Path from the root to a value, as indices of map entries and list elements.
pub(super) type ValuePath = Vec<usize>;

/// Deserializes the tree, or returns every error with its position. `text` is the source of the
/// tree, and relative paths begin in `directory`.
pub(super) fn read<T: DeserializeOwned>(
    tree: &YamlNode,
    text: &str,
    directory: &Path,
    unresolved: &[UnresolvedText],
) -> Result<T, Vec<(SourcePosition, String)>> {
    let mut removed = RemovedValues::default();
    let mut errors = Vec::new();
    for value in unresolved {
        removed.add(&value.path, tree);
        errors.push((value.position, value.problem.clone()));
    }
    let mut listed_maps = HashSet::new();
    loop {
        let error = match T::deserialize(ValueReader::of_root(tree, text, directory, &removed)) {
            Ok(value) if errors.is_empty() => return Ok(value),
            Ok(_) => return Err(errors),
            Err(error) => error,
        };
        if !removed.is_consequence(&error) {
            // The keys of a map are listed only once.
            let lists_keys = error.lists_keys()
                && error
                    .path
                    .split_last()
                    .is_none_or(|(_, outer)| listed_maps.insert(outer.to_vec()));
            let message = match &value_at(tree, &error.path).written {
                Some(written) if error.concerns_value() => {
                    let mut removed = removed.clone();
                    removed.as_written.insert(error.path.clone());
                    let reader = ValueReader::of_root(tree, text, directory, &removed);
                    describe_variable(T::deserialize(reader).err(), &error, written)
                }
                _ => error.message(lists_keys),
            };
            errors.push((error.position, message));
        }
        // Each pass removes one more value, so the loop terminates. The root cannot be removed.
        let is_last = error.path.is_empty() || errors.len() >= MAX_ERRORS;
        if is_last || !removed.add_rejected(&error, tree) {
            return Err(errors);
        }
    }
}

/// Returns the message for a text with variables whose value was rejected with `error`. It must not
/// contain the value, which may be a secret. `as_written` is the error for the text in the file.
fn describe_variable(
    as_written: Option<SettingsError>,
    error: &SettingsError,
    written: &str,
) -> String {
    let message = as_written
        .filter(|other| other.path == error.path)
        .map_or_else(
            || format!("`{}`: `{written}` is not valid", error.name),
            |other| other.message(false),
        );
    format!("{message}; the value comes from the environment")
}

/// Values that further passes skip.
#[derive(Clone, Default)]
struct RemovedValues {
    values: HashSet<ValuePath>,
    /// Texts with variables that are read as they are in the file.
    as_written: HashSet<ValuePath>,
    /// Keys of maps whose absence is not an error of its own: the value was removed, or the key is
    /// probably misspelt and reported as unknown.
    absent_keys: HashSet<(ValuePath, String)>,
}

impl RemovedValues {
    fn is_consequence(&self, error: &SettingsError) -> bool {
        match &error.kind {
            SettingsErrorKind::Missing(key) => self
                .absent_keys
                .contains(&(error.path.clone(), (*key).to_owned())),
            _ => false,
        }
    }

    fn add(&mut self, path: &[usize], tree: &YamlNode) -> bool {
        if let Some((position, outer)) = path.split_last()
            && let YamlValue::Map(entries) = &value_at(tree, outer).value
        {
            self.absent_keys
                .insert((outer.to_vec(), entries[*position].0.name.clone()));
        }
        self.values.insert(path.to_vec())
    }

    fn add_rejected(&mut self, error: &SettingsError, tree: &YamlNode) -> bool {
        if let (
            SettingsErrorKind::Unknown {
                meant: Some(meant), ..
            },
            Some((_, outer)),
        ) = (&error.kind, error.path.split_last())
        {
            self.absent_keys
                .insert((outer.to_vec(), (*meant).to_owned()));
        }
        self.add(&error.path, tree)
    }
}

fn value_at<'a>(tree: &'a YamlNode, path: &[usize]) -> &'a YamlNode {
    path.iter().fold(tree, |here, &position| match &here.value {
        YamlValue::Map(entries) => &entries[position].1,
        YamlValue::List(items) => &items[position],
        _ => here,
    })
}

/// Returns the text of the plain scalar at a position.
fn scalar_at(text: &str, position: SourcePosition) -> &str {
    let line = text.lines().nth(position.line.saturating_sub(1));
    let rest = line
        .and_then(|line| line.get(position.column.saturating_sub(1)..))
        .unwrap_or_default();
    let end = rest.find([',', '}', ']', ' ', '#']).unwrap_or(rest.len());
    &rest[..end]
}

/// Deserializer of one value.
struct ValueReader<'a> {
    tree: &'a YamlNode,
    path: ValuePath,
    name: String,
    removed: &'a RemovedValues,
    /// Source of the whole tree.
    text: &'a str,
    /// Directory in which relative paths begin.
    directory: &'a Path,
}

impl<'a> ValueReader<'a> {
    fn of_root(
        tree: &'a YamlNode,
        text: &'a str,
        directory: &'a Path,
        removed: &'a RemovedValues,
    ) -> Self {
        Self {
            tree,
            path: ValuePath::new(),
            name: String::new(),
            removed,
            text,
            directory,
        }
    }

    /// Returns the value of a text with variables.
    fn substituted(&self) -> Option<&'a str> {
        match &self.tree.value {
            YamlValue::Text(text) if self.tree.written.is_some() && !self.is_read_as_written() => {
                Some(text)
            }
            _ => None,
        }
    }

    fn is_read_as_written(&self) -> bool {
        self.removed.as_written.contains(&self.path)
    }

    fn inner(&self, position: usize, tree: &'a YamlNode, name: String) -> Self {
        let mut path = self.path.clone();
        path.push(position);
        Self {
            tree,
            path,
            name,
            removed: self.removed,
            text: self.text,
            directory: self.directory,
        }
    }

    /// Returns the elements of this list that were not removed.
    fn elements(&self, items: &'a [YamlNode]) -> impl Iterator<Item = Self> {
        let items = items.iter().enumerate();
        items
            .filter(|(position, _)| !self.is_removed(*position))
            .map(|(position, tree)| {
                self.inner(position, tree, format!("{}[{position}]", self.name))
            })
    }

    /// Returns the keys and values of this map that were not removed.
    fn entries(&self, entries: &'a [(YamlKey, YamlNode)]) -> impl Iterator<Item = (&'a str, Self)> {
        let entries = entries.iter().enumerate();
        entries
            .filter(|(position, (key, _))| {
                !self.is_removed(*position) && !self.is_ignored(&key.name)
            })
            .map(|(position, (key, tree))| {
                let value = self.inner(position, tree, key.name.clone());
                (key.name.as_str(), value)
            })
    }

    fn is_ignored(&self, key: &str) -> bool {
        self.path.is_empty() && is_ignored_key(key)
    }

    fn is_removed(&self, position: usize) -> bool {
        !self.removed.values.is_empty()
            && self
                .removed
                .values
                .contains(&[&self.path[..], &[position]].concat())
    }

    /// Adds the position of this value to an error, unless an inner value has already done so.
    fn locate(&self, mut error: SettingsError) -> SettingsError {
        if !error.located {
            error.located = true;
            error.position = self.tree.position;
            error.path.clone_from(&self.path);
            error.name = self.name.as_str().into();
            if let (SettingsErrorKind::Rejected(text), YamlValue::Text(given)) =
                (&mut error.kind, &self.tree.value)
                && text == "invalid socket address syntax"
            {
                let written = self.tree.written.as_deref();
                *text = describe_address(written.unwrap_or(given), &self.name);
            }
            if let (SettingsErrorKind::WrongType(text), YamlValue::Float(number)) =
                (&mut error.kind, &self.tree.value)
            {
                // Large numbers lose digits when they are parsed.
                let written = scalar_at(self.text, self.tree.position);
                if written.parse() == Ok(*number) {
                    *text = text.replace(&format!("not {number}"), &format!("not {written}"));
                }
            }
        }
        error
    }

    fn unexpected(&self) -> Unexpected<'a> {
        match &self.tree.value {
            YamlValue::Null => Unexpected::Unit,
            YamlValue::Bool(value) => Unexpected::Bool(*value),
            YamlValue::Unsigned(value) => Unexpected::Unsigned(*value),
            YamlValue::Signed(value) => Unexpected::Signed(*value),
            YamlValue::Float(value) => Unexpected::Float(*value),
            YamlValue::Text(value) => {
                let written = self.tree.written.as_deref();
                Unexpected::Str(written.unwrap_or(value))
            }
            YamlValue::List(_) => Unexpected::Seq,
            YamlValue::Map(_) => Unexpected::Map,
        }
    }

    fn visit_any<'de, V: Visitor<'de>>(&self, visitor: V) -> Result<V::Value, SettingsError> {
        match &self.tree.value {
            YamlValue::Null => visitor.visit_unit(),
            YamlValue::Bool(value) => visitor.visit_bool(*value),
            YamlValue::Unsigned(value) => visitor.visit_u64(*value),
            YamlValue::Signed(value) => visitor.visit_i64(*value),
            YamlValue::Float(value) => visitor.visit_f64(*value),
            YamlValue::Text(value) => {
                let written = self.tree.written.as_deref();
                let written = written.filter(|_| self.is_read_as_written());
                visitor.visit_str(written.unwrap_or(value))
            }
            YamlValue::List(items) => visitor.visit_seq(SeqDeserializer::new(self.elements(items))),
            YamlValue::Map(entries) => {
                visitor.visit_map(MapDeserializer::new(self.entries(entries)))
            }
        }
    }

    /// Visits a number, also one that is the value of a text with variables.
    fn visit_number<'de, V: Visitor<'de>>(&self, visitor: V) -> Result<V::Value, SettingsError> {
        let Some(text) = self.substituted() else {
            return self.visit_any(visitor);
        };
        if let Ok(number) = text.parse() {
            visitor.visit_u64(number)
        } else if let Ok(number) = text.parse() {
            visitor.visit_i64(number)
        } else if let Ok(number) = text.parse() {
            visitor.visit_f64(number)
        } else {
            self.visit_any(visitor)
        }
    }

    /// Returns an error if a key is not among `fields`.
    fn check_keys(&self, fields: &'static [&'static str]) -> Result<(), SettingsError> {
        let YamlValue::Map(entries) = &self.tree.value else {
            return Ok(());
        };
        for (position, (key, tree)) in entries.iter().enumerate() {
            if !fields.contains(&key.name.as_str())
                && !self.is_ignored(&key.name)
                && !self.is_removed(position)
            {
                let mut error = self
                    .inner(position, tree, self.name.clone())
                    .locate(de::Error::unknown_field(&key.name, fields));
                error.position = key.position;
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Defines methods that read a number, also from a text with variables.
macro_rules! forward_to_number {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SettingsError> {
            self.visit_number(visitor).map_err(|error| self.locate(error))
        })*
    };
}

impl<'de> Deserializer<'de> for ValueReader<'_> {
    type Error = SettingsError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SettingsError> {
        self.visit_any(visitor).map_err(|error| self.locate(error))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SettingsError> {
        match self.tree.value {
            YamlValue::Null => visitor.visit_none(),
            // A variable without a value leaves an optional key unset.
            _ if self.substituted() == Some("") => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, SettingsError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, SettingsError> {
        self.check_keys(fields)?;
        let result = match &self.tree.value {
            // A section without keys has the default values.
            YamlValue::Null => visitor.visit_map(MapDeserializer::new(self.entries(&[]))),
            YamlValue::Map(_) => self.visit_any(visitor),
            _ => Err(de::Error::invalid_type(self.unexpected(), &visitor)),
        };
        result.map_err(|error| self.locate(error))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, SettingsError> {
        let result = match &self.tree.value {
            YamlValue::Text(name) => {
                let written = self.tree.written.as_deref();
                let written = written.filter(|_| self.is_read_as_written());
                let name = written.unwrap_or(name);
                visitor.visit_enum(IntoDeserializer::<SettingsError>::into_deserializer(name))
            }
            _ => Err(de::Error::invalid_type(self.unexpected(), &visitor)),
        };
        result.map_err(|error| self.locate(error))
    }

    /// Makes a relative path absolute. Serde reads a path as a text.
    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SettingsError> {
        let expectation = (&visitor as &dyn de::Expected).to_string();
        match &self.tree.value {
            YamlValue::Text(text) if expectation == PATH_EXPECTATION => {
                let path = self.directory.join(text);
                // Reloads and status pages write the configuration as JSON.
                let text = path.to_str().ok_or_else(|| de::Error::custom(NOT_UTF8));
                text.and_then(|text| visitor.visit_str(text))
                    .map_err(|error| self.locate(error))
            }
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SettingsError> {
        match self.substituted().map(str::parse) {
            Some(Ok(value)) => visitor
                .visit_bool(value)
                .map_err(|error| self.locate(error)),
            _ => self.deserialize_any(visitor),
        }
    }

    forward_to_number! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_u8 deserialize_u16 deserialize_u32
        deserialize_u64 deserialize_f32 deserialize_f64
    }

    forward_to_deserialize_any! {
        i128 u128 char str bytes byte_buf unit unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, SettingsError> for ValueReader<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}
