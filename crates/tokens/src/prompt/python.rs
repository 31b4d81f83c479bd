//! Template values with the string conversions of Python. Chat templates depend on the output of
//! Python's `str`, `repr` and `json.dumps`. If minijinja would print a value differently, or if the
//! output differs between versions of Python, the output contains [`POISON`] and rendering
//! fails.

use std::fmt::{self, Write};
use std::sync::Arc;

use super::error::EncodeError;
use super::number;
use super::printable::is_printable;
use crate::openai::JsonValue;
use hashbrown::DefaultHashBuilder;
use indexmap::IndexMap;
use minijinja::value::{Enumerator, Kwargs, Object, ObjectExt, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Marks text that cannot be printed as in Python. Rendering fails if the output contains the mark,
/// even if the mark comes from the request.
pub(super) const POISON: &str = "\u{10ffff}?\u{10ffff}";

/// A Python `dict` with string keys, in insertion order.
#[derive(Debug, Default)]
pub(super) struct PythonDict(IndexMap<Arc<str>, Value, DefaultHashBuilder>);

impl PythonDict {
    /// Adds an entry; the key must be new.
    pub(super) fn push(&mut self, key: &str, value: Value) {
        self.0.insert(Arc::from(key), value);
    }

    pub(super) fn into_value(self) -> Value {
        Value::from_object(self)
    }
}

impl<'k> FromIterator<(&'k str, Value)> for PythonDict {
    fn from_iter<I: IntoIterator<Item = (&'k str, Value)>>(entries: I) -> Self {
        let entries = entries.into_iter();
        Self(entries.map(|(key, value)| (key.into(), value)).collect())
    }
}

impl Object for PythonDict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_enumerator(|this| {
            Box::new(this.0.keys().map(|key| Value::from(Arc::clone(key))))
        })
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&repr(&Value::from_dyn_object(Arc::clone(self))))
    }
}

/// A Python `list` or `tuple`, which differ in their brackets.
#[derive(Debug)]
struct PythonSequence {
    values: Vec<Value>,
    brackets: (char, char),
}

impl Object for PythonSequence {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.values.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.values.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&repr(&Value::from_dyn_object(Arc::clone(self))))
    }
}

/// A float that minijinja prints differently from Python: very large, very small or not finite.
#[derive(Debug)]
struct UncommonFloat(f64);

impl Object for UncommonFloat {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&float_text(self.0, REPR_NAMES))
    }
}

/// Returns true if minijinja prints a float as Python does.
fn is_common(number: f64) -> bool {
    number.is_finite() && Value::from(number).to_string() == number::repr(number)
}

fn float(number: f64) -> Value {
    if is_common(number) {
        Value::from(number)
    } else {
        Value::from_object(UncommonFloat(number))
    }
}

/// Returns true if a value contains an [`UncommonFloat`]. minijinja compares it as an object,
/// Python as a number.
fn contains_uncommon_float(json: &JsonValue) -> bool {
    match json {
        JsonValue::Float(number) => !is_common(*number),
        JsonValue::Array(items) => items.iter().any(contains_uncommon_float),
        JsonValue::Object(object) => object.values().any(contains_uncommon_float),
        JsonValue::Null | JsonValue::Bool(_) | JsonValue::Integer(_) => false,
        JsonValue::String(_) | JsonValue::Unknown(_) => false,
    }
}

/// Returns true for Python numbers, which include booleans.
pub(super) fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool) || is_float(value)
}

/// Returns true for floats.
pub(super) fn is_float(value: &Value) -> bool {
    let common = value.kind() == ValueKind::Number && !value.is_integer();
    common || value.downcast_object_ref::<UncommonFloat>().is_some()
}

/// Brackets of a list, including minijinja's own lists.
const SQUARE_BRACKETS: (char, char) = ('[', ']');

/// Creates a list.
pub(super) fn list(values: Vec<Value>) -> Value {
    Value::from_object(PythonSequence {
        values,
        brackets: SQUARE_BRACKETS,
    })
}

/// Creates a tuple of two or more values.
pub(super) fn tuple(values: Vec<Value>) -> Value {
    Value::from_object(PythonSequence {
        values,
        brackets: ('(', ')'),
    })
}

/// Converts JSON as Python's `json.loads` does.
pub(super) fn value(json: &JsonValue) -> Result<Value, EncodeError> {
    Ok(match json {
        JsonValue::Null => Value::from(()),
        JsonValue::Bool(flag) => Value::from(*flag),
        JsonValue::Integer(number) => match (i64::try_from(*number), u64::try_from(*number)) {
            (Ok(short), _) => Value::from(short),
            (_, Ok(short)) => Value::from(short),
            _ => Value::from(*number),
        },
        JsonValue::Float(number) => float(*number),
        JsonValue::String(text) => Value::from(text.as_str()),
        JsonValue::Array(items) => list(items.iter().map(value).collect::<Result<_, _>>()?),
        JsonValue::Object(object) => {
            let mut dict = PythonDict::default();
            for (key, item) in object {
                dict.push(key, value(item)?);
            }
            dict.into_value()
        }
        JsonValue::Unknown(why) => return Err(EncodeError::uncertain(*why)),
    })
}

/// Converts JSON for a variable that a template may compare with other values.
pub(super) fn comparable_value(json: &JsonValue) -> Result<Value, EncodeError> {
    if contains_uncommon_float(json) {
        return Err(EncodeError::uncertain(
            "a float that the template engine cannot compare as Python does",
        ));
    }
    value(json)
}

/// Returns Python's `str(value)`, which `{{ value }}` prints.
pub(super) fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => repr(value),
    }
}

/// Returns Python's `repr(value)`.
fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(&mut out, value, 0);
    out
}

fn write_repr(out: &mut String, value: &Value, depth: usize) {
    if depth > 128 {
        return out.push_str(POISON);
    }
    if let Some(UncommonFloat(number)) = value.downcast_object_ref() {
        return out.push_str(&float_text(*number, REPR_NAMES));
    }
    match value.kind() {
        ValueKind::None | ValueKind::Bool => out.push_str(&value.to_string()),
        ValueKind::Number => out.push_str(&number_text(value, REPR_NAMES)),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => write_items(out, value, depth),
        ValueKind::Map => write_pairs(out, value, depth),
        _ => out.push_str(POISON),
    }
}

fn write_items(out: &mut String, value: &Value, depth: usize) {
    let (open, close) = value
        .downcast_object_ref::<PythonSequence>()
        .map_or(SQUARE_BRACKETS, |sequence| sequence.brackets);
    out.push(open);
    for (place, item) in value.try_iter().into_iter().flatten().enumerate() {
        out.push_str(if place > 0 { ", " } else { "" });
        write_repr(out, &item, depth + 1);
    }
    out.push(close);
}

fn write_pairs(out: &mut String, value: &Value, depth: usize) {
    out.push('{');
    for (place, key) in value.try_iter().into_iter().flatten().enumerate() {
        out.push_str(if place > 0 { ", " } else { "" });
        write_repr(out, &key, depth + 1);
        out.push_str(": ");
        write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
    }
    out.push('}');
}

/// Names of NaN, infinity and negative infinity in `repr`.
const REPR_NAMES: [&str; 3] = ["nan", "inf", "-inf"];

/// The same notation in `json.dumps`.
const JSON_NAMES: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

fn number_text(value: &Value, names: [&str; 3]) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone())
        .map_or_else(|_| POISON.to_owned(), |number| float_text(number, names))
}

fn float_text(number: f64, names: [&str; 3]) -> String {
    match number {
        _ if number.is_finite() => number::repr(number),
        _ if number.is_nan() => names[0].to_owned(),
        _ if number > 0.0 => names[1].to_owned(),
        _ => names[2].to_owned(),
    }
}

/// Writes a quoted string. A character that some versions of Python escape is not printed.
fn write_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            ' '..='~' => out.push(c),
            c => match is_printable(c) {
                Some(true) => out.push(c),
                Some(false) => write_code_point(out, c),
                None => out.push_str(POISON),
            },
        }
    }
    out.push(quote);
}

fn write_code_point(out: &mut String, c: char) {
    let code = u32::from(c);
    out.push_str(&match code {
        0..=0xff => format!("\\x{code:02x}"),
        0x100..=0xffff => format!("\\u{code:04x}"),
        _ => format!("\\U{code:08x}"),
    });
}

/// Output format of `json.dumps`.
struct JsonLayout {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

/// Implements the filter `tojson` of transformers: `json.dumps` with `ensure_ascii` off and without
/// HTML escaping.
pub(super) fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    options: &Kwargs,
) -> Result<String, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(none) if none.is_none() => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(width) => Some(" ".repeat(i64::try_from(width)?.clamp(0, 64).unsigned_abs() as usize)),
    };
    let separators = options
        .get::<Option<Value>>("separators")?
        .filter(|value| !value.is_none());
    let separator = |place: usize, default: &str| match &separators {
        None => Ok(default.to_owned()),
        Some(pair) => pair
            .get_item(&Value::from(place))
            .map(|text| self::text(&text)),
    };
    let layout = JsonLayout {
        ensure_ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .or(ensure_ascii)
            .unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        item: separator(0, if indent.is_some() { "," } else { ", " })?,
        key: separator(1, ": ")?,
        indent,
    };
    options.assert_all_used()?;
    let mut out = String::new();
    layout.write(&mut out, value, 0)?;
    Ok(out)
}

impl JsonLayout {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        let json_error = |what: String| Err(Error::new(ErrorKind::InvalidOperation, what));
        if depth > 256 {
            return json_error("JSON is nested too deeply".to_owned());
        }
        if let Some(UncommonFloat(number)) = value.downcast_object_ref() {
            out.push_str(&float_text(*number, JSON_NAMES));
            return Ok(());
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number_text(value, JSON_NAMES)),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<_> = value.try_iter()?.map(|item| (None, item)).collect();
                self.write_all(out, ('[', ']'), depth, &items)?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if keys.iter().any(|key| key.as_str().is_none()) {
                    return json_error("a key is not a string".to_owned());
                }
                if self.sort_keys {
                    keys.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
                }
                let item = |key: Value| value.get_item(&key).map(|item| (Some(key), item));
                let items: Vec<_> = keys.into_iter().map(item).collect::<Result<_, _>>()?;
                self.write_all(out, ('{', '}'), depth, &items)?;
            }
            kind => return json_error(format!("{kind} is not JSON")),
        }
        Ok(())
    }

    fn write_all(
        &self,
        out: &mut String,
        brackets: (char, char),
        depth: usize,
        items: &[(Option<Value>, Value)],
    ) -> Result<(), Error> {
        let newline = |out: &mut String, depth: usize| {
            if let (Some(indent), false) = (&self.indent, items.is_empty()) {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        out.push(brackets.0);
        for (place, (key, item)) in items.iter().enumerate() {
            out.push_str(if place > 0 { &self.item } else { "" });
            newline(out, depth + 1);
            if let Some(key) = key {
                self.write_string(out, key.as_str().unwrap_or_default());
                out.push_str(&self.key);
            }
            self.write(out, item, depth + 1)?;
        }
        newline(out, depth);
        out.push(brackets.1);
        Ok(())
    }

    fn write_string(&self, out: &mut String, text: &str) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            return out.push_str(&quoted);
        }
        for c in quoted.chars() {
            match c {
                ' '..='~' => out.push(c),
                _ => write_escape(out, c),
            }
        }
    }
}

fn write_escape(out: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        let _infallible = write!(out, "\\u{unit:04x}");
    }
}

#[cfg(test)]
mod tests;
