//! A YAML document as a tree. Every value and every key has its position.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::{PathStep, SourcePosition};

/// A YAML value with its position.
#[derive(Clone, Debug, PartialEq)]
pub struct YamlNode {
    /// The value.
    pub value: YamlValue,
    /// Position of its start. Of an alias, that of the alias.
    pub position: SourcePosition,
    /// Position of its text. Of an alias, that of the anchored text.
    pub(super) defined: SourcePosition,
    /// Text in the file, if variables were replaced in it.
    pub(super) written: Option<Box<str>>,
}

/// A YAML value.
#[derive(Clone, Debug, PartialEq)]
pub enum YamlValue {
    /// Empty, `~` or `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// Non-negative integer.
    Unsigned(u64),
    /// Negative integer.
    Signed(i64),
    /// A number with a fraction or an exponent, or a non-finite number.
    Float(f64),
    /// Text.
    Text(String),
    /// List.
    List(Vec<YamlNode>),
    /// Map, in the order of the file.
    Map(Vec<(YamlKey, YamlNode)>),
}

/// A key of a map with its position.
#[derive(Clone, Debug, PartialEq)]
pub struct YamlKey {
    /// The text of the key.
    pub name: String,
    /// Position of its start.
    pub position: SourcePosition,
}

impl YamlNode {
    /// Returns the position of a key of this map.
    pub(super) fn position_of_key(&self, key: &str) -> Option<SourcePosition> {
        let YamlValue::Map(entries) = &self.value else {
            return None;
        };
        let found = entries.iter().find(|(name, _)| name.name == key);
        found.map(|(name, _)| name.position)
    }

    /// Returns the position of the value at the end of a path. If it does not exist, returns the
    /// position of the last value on the path that exists.
    pub(super) fn position_of(&self, path: &[PathStep]) -> SourcePosition {
        let mut node = self;
        for step in path {
            let next = match (&node.value, step) {
                (YamlValue::Map(entries), PathStep::Key(key)) => entries
                    .iter()
                    .find(|(name, _)| name.name == *key)
                    .map(|(_, value)| value),
                (YamlValue::List(items), PathStep::At(at)) => items.get(*at),
                _ => None,
            };
            match next {
                Some(next) => node = next,
                None => break,
            }
        }
        node.position
    }
}

/// Parses one YAML document. Returns an error with its position.
pub(super) fn parse(text: &str) -> Result<YamlNode, (SourcePosition, String)> {
    // Non-finite numbers are accepted here. The check of each setting rejects them with a better
    // message.
    let options = serde_saphyr::options! {
        with_snippet: false,
        strict_booleans: true,
        // Settings are shallow. The limit protects the stack from a hostile file.
        budget: serde_saphyr::budget! { max_depth: 64 },
        non_finite_float_policy: serde_saphyr::NonFiniteFloatPolicy::PassThrough,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let position = error.location().map(position).unwrap_or_default();
        let formatter = serde_saphyr::UserMessageFormatter;
        let message = error.without_snippet().render_with_formatter(&formatter);
        let message = strip_position(&message);
        // A tab can also stand beside an unrelated error.
        let concerns_indentation = message.contains("tab") || message.contains("indent");
        let tab = find_tab_indentation(text, position.line).filter(|_| concerns_indentation);
        if let Some(line) = tab {
            let problem = "the line begins with a tab; YAML is indented with spaces only";
            return (SourcePosition { line, column: 1 }, problem.to_owned());
        }
        (position, format!("this is not valid YAML: {message}"))
    })
}

/// Returns the number of a line that has a tab in its indentation, at the position of an error or
/// next to it.
fn find_tab_indentation(text: &str, line_of_error: usize) -> Option<usize> {
    let lines = (1_usize..).zip(text.lines());
    lines
        .filter(|(number, _)| number.abs_diff(line_of_error) <= 1)
        .find(|(_, line)| {
            let indentation = line.len() - line.trim_start().len();
            line[..indentation].contains('\t')
        })
        .map(|(number, _)| number)
}

/// Removes the position and internal names from a message of the YAML parser. The error states the
/// position separately.
fn strip_position(message: &str) -> &str {
    let message = message.lines().next().unwrap_or_default();
    let message = message
        .find(" at line ")
        .map_or(message, |end| &message[..end]);
    // The limits are internal names of the parser.
    let message = message.split(": limits breached").next().unwrap_or(message);
    message
        .split_once(": ")
        .filter(|(head, _)| head.starts_with("line "))
        .map_or(message, |(_, tail)| tail)
}

fn position(location: serde_saphyr::Location) -> SourcePosition {
    let number = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    SourcePosition {
        line: number(location.line()),
        column: number(location.column()),
    }
}

impl<'de> Deserialize<'de> for YamlNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<YamlValue>::deserialize(deserializer)?;
        Ok(Self {
            value: spanned.value,
            position: position(spanned.referenced),
            defined: position(spanned.defined),
            written: None,
        })
    }
}

impl<'de> Deserialize<'de> for YamlValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = YamlValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_none<E>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<YamlValue, E> {
        Ok(YamlValue::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<YamlValue, E> {
        Ok(YamlValue::Unsigned(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<YamlValue, E> {
        Ok(u64::try_from(value).map_or(YamlValue::Signed(value), YamlValue::Unsigned))
    }

    fn visit_i128<E: serde::de::Error>(self, value: i128) -> Result<YamlValue, E> {
        Err(E::custom(format!(
            "the number {value} does not fit 64 bits"
        )))
    }

    fn visit_u128<E: serde::de::Error>(self, value: u128) -> Result<YamlValue, E> {
        Err(E::custom(format!(
            "the number {value} does not fit 64 bits"
        )))
    }

    fn visit_f64<E>(self, value: f64) -> Result<YamlValue, E> {
        Ok(YamlValue::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<YamlValue, E> {
        Ok(YamlValue::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<YamlValue, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(YamlValue::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<YamlValue, A::Error> {
        let mut map: Vec<(YamlKey, YamlNode)> = Vec::new();
        while let Some(key) = entries.next_key::<Spanned<String>>()? {
            let key = YamlKey {
                name: key.value,
                position: position(key.referenced),
            };
            if map.iter().any(|(known, _)| known.name == key.name) {
                return Err(A::Error::custom(format!("`{}` is given twice", key.name)));
            }
            map.push((key, entries.next_value()?));
        }
        Ok(YamlValue::Map(map))
    }
}
