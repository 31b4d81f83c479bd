//! JSON values, parsed as in Python's `json` module, which engines use for requests and tool
//! arguments. Integers of any length stay integers, `-0` is `0`, `NaN` and `Infinity` are numbers,
//! and the last of several equal keys takes effect.

use indexmap::IndexMap;
use serde::de::{self, Deserialize, Deserializer, Unexpected};
use serde::ser::{self, Serialize, Serializer};
use serde_json::value::RawValue;
use thiserror::Error;

use super::json_scan;

/// Maximum nesting. Python accepts more, but no real request needs it.
const MAX_DEPTH: usize = 200;

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum JsonValue {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number without fraction and exponent.
    Integer(i128),
    /// Any other number, including non-finite ones.
    Float(f64),
    /// A string.
    String(String),
    /// A list.
    Array(Vec<JsonValue>),
    /// An object.
    Object(JsonObject),
    /// A value that is unknown or that only Python can parse, with the reason.
    Unknown(&'static str),
}

/// Entries of a JSON object in order.
pub type JsonObject = IndexMap<String, JsonValue>;

/// Reason why a text cannot be parsed.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum JsonError {
    /// Python rejects the text as well.
    #[error("not JSON")]
    Invalid,
    /// Only Python accepts the text.
    #[error("JSON with {0}")]
    Unsupported(&'static str),
}

impl JsonValue {
    /// Parses a text that consists of one value.
    pub fn parse(text: &str) -> Result<Self, JsonError> {
        let mut reader = JsonReader { text, at: 0 };
        reader.skip_space();
        let value = reader.value(0)?;
        reader.skip_space();
        if reader.at == text.len() {
            Ok(value)
        } else {
            Err(JsonError::Invalid)
        }
    }

    /// Returns the text, if the value is a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the entries, if the value is an object.
    pub fn as_object(&self) -> Option<&JsonObject> {
        match self {
            Self::Object(object) => Some(object),
            _ => None,
        }
    }

    /// Returns an entry, if the value is an object.
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.as_object()?.get(key)
    }

    /// Returns true for a string.
    pub fn is_string(&self) -> bool {
        matches!(self, Self::String(_))
    }

    /// Returns true for `null`.
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    /// Returns true for an object.
    pub fn is_object(&self) -> bool {
        matches!(self, Self::Object(_))
    }

    /// Returns true if all JSON parsers read the same numbers: the value has only finite floats,
    /// and integers of at most 64 bits.
    pub(crate) fn is_portable(&self) -> bool {
        match self {
            Self::Null | Self::Bool(_) | Self::String(_) => true,
            Self::Integer(number) => {
                i64::try_from(*number).is_ok() || u64::try_from(*number).is_ok()
            }
            Self::Float(number) => number.is_finite(),
            Self::Array(items) => items.iter().all(Self::is_portable),
            Self::Object(object) => object.values().all(Self::is_portable),
            Self::Unknown(_) => false,
        }
    }

    /// Returns the approximate length of the value as text.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Null | Self::Bool(_) | Self::Integer(_) | Self::Float(_) | Self::Unknown(_) => 4,
            Self::String(text) => text.len() + 2,
            Self::Array(items) => {
                2 + items
                    .iter()
                    .map(|item| item.text_bytes() + 2)
                    .sum::<usize>()
            }
            Self::Object(object) => {
                2 + object
                    .iter()
                    .map(|(key, value)| key.len() + value.text_bytes() + 6)
                    .sum::<usize>()
            }
        }
    }

    /// Creates an object with these entries.
    pub(crate) fn object<const N: usize>(entries: [(&str, JsonValue); N]) -> Self {
        Self::Object(
            entries
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect(),
        )
    }
}

impl From<&str> for JsonValue {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<String> for JsonValue {
    fn from(text: String) -> Self {
        Self::String(text)
    }
}

impl Serialize for JsonValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(flag) => serializer.serialize_bool(*flag),
            Self::Integer(number) => serializer.serialize_i128(*number),
            Self::Float(number) => serializer.serialize_f64(*number),
            Self::String(text) => serializer.serialize_str(text),
            Self::Array(items) => serializer.collect_seq(items),
            Self::Object(object) => serializer.collect_map(object),
            Self::Unknown(why) => Err(ser::Error::custom(why)),
        }
    }
}

impl<'de> Deserialize<'de> for JsonValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        match Self::parse(raw.get()) {
            Err(JsonError::Unsupported(why)) => Ok(Self::Unknown(why)),
            read => read.map_err(de::Error::custom),
        }
    }
}

/// Deserializes a field that is an object, absent or `null`.
pub(super) fn object<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<JsonObject>, D::Error> {
    match Option::<JsonValue>::deserialize(deserializer)? {
        None | Some(JsonValue::Null) => Ok(None),
        Some(JsonValue::Object(object)) => Ok(Some(object)),
        Some(_) => Err(de::Error::invalid_type(
            Unexpected::Other("another value"),
            &"an object",
        )),
    }
}

struct JsonReader<'t> {
    text: &'t str,
    at: usize,
}

impl JsonReader<'_> {
    fn rest(&self) -> &[u8] {
        &self.text.as_bytes()[self.at..]
    }

    fn skip_space(&mut self) {
        self.at = json_scan::skip_space(self.text.as_bytes(), self.at);
    }

    /// Consumes a byte if it is the next one.
    fn consume(&mut self, byte: u8) -> bool {
        let is_next = self.rest().first() == Some(&byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn value(&mut self, depth: usize) -> Result<JsonValue, JsonError> {
        if depth > MAX_DEPTH {
            return Err(JsonError::Unsupported("more than 200 levels of nesting"));
        }
        match self.rest().first().ok_or(JsonError::Invalid)? {
            b'{' => self.object(depth).map(JsonValue::Object),
            b'[' => self.array(depth).map(JsonValue::Array),
            b'"' => self.string().map(JsonValue::String),
            _ => self.literal().map_or_else(|| self.number(), Ok),
        }
    }

    fn object(&mut self, depth: usize) -> Result<JsonObject, JsonError> {
        let mut object = JsonObject::new();
        self.elements(b'}', |reader| {
            if reader.rest().first() != Some(&b'"') {
                return Err(JsonError::Invalid);
            }
            let key = reader.string()?;
            reader.skip_space();
            if !reader.consume(b':') {
                return Err(JsonError::Invalid);
            }
            reader.skip_space();
            // A repeated key replaces the value at the first position.
            object.insert(key, reader.value(depth + 1)?);
            Ok(())
        })?;
        Ok(object)
    }

    fn array(&mut self, depth: usize) -> Result<Vec<JsonValue>, JsonError> {
        let mut items = Vec::new();
        self.elements(b']', |reader| {
            items.push(reader.value(depth + 1)?);
            Ok(())
        })?;
        Ok(items)
    }

    /// Reads the elements of a container up to its closing bracket.
    fn elements(
        &mut self,
        closing: u8,
        mut read: impl FnMut(&mut Self) -> Result<(), JsonError>,
    ) -> Result<(), JsonError> {
        self.at += 1;
        self.skip_space();
        if self.consume(closing) {
            return Ok(());
        }
        loop {
            self.skip_space();
            read(self)?;
            self.skip_space();
            if self.consume(closing) {
                return Ok(());
            }
            if !self.consume(b',') {
                return Err(JsonError::Invalid);
            }
        }
    }

    fn string(&mut self) -> Result<String, JsonError> {
        let end =
            json_scan::end_of_text(self.text.as_bytes(), self.at).ok_or(JsonError::Invalid)?;
        let quoted = self.text.get(self.at..end).ok_or(JsonError::Invalid)?;
        self.at = end;
        serde_json::from_str(quoted).map_err(|_| {
            // Python accepts unpaired surrogates, which a Rust string cannot represent.
            if quoted.contains("\\u") {
                JsonError::Unsupported("an unpaired surrogate")
            } else {
                JsonError::Invalid
            }
        })
    }

    /// Reads a literal such as `true` or `null`.
    fn literal(&mut self) -> Option<JsonValue> {
        let words = [
            ("null", JsonValue::Null),
            ("true", JsonValue::Bool(true)),
            ("false", JsonValue::Bool(false)),
            ("NaN", JsonValue::Float(f64::NAN)),
            ("Infinity", JsonValue::Float(f64::INFINITY)),
            ("-Infinity", JsonValue::Float(f64::NEG_INFINITY)),
        ];
        let (word, value) = words
            .into_iter()
            .find(|(word, _)| self.rest().starts_with(word.as_bytes()))?;
        self.at += word.len();
        Some(value)
    }

    fn number(&mut self) -> Result<JsonValue, JsonError> {
        let start = self.at;
        self.consume(b'-');
        if !self.consume(b'0') && self.digits() == 0 {
            return Err(JsonError::Invalid);
        }
        let whole = self.at;
        if self.consume(b'.') && self.digits() == 0 {
            return Err(JsonError::Invalid);
        }
        if self.consume(b'e') || self.consume(b'E') {
            let _sign = self.consume(b'+') || self.consume(b'-');
            if self.digits() == 0 {
                return Err(JsonError::Invalid);
            }
        }
        let text = &self.text[start..self.at];
        if self.at == whole {
            let long = JsonError::Unsupported("an integer of more than 38 digits");
            return text.parse().map(JsonValue::Integer).map_err(|_| long);
        }
        text.parse()
            .map(JsonValue::Float)
            .map_err(|_| JsonError::Invalid)
    }

    /// Consumes digits and returns their number.
    fn digits(&mut self) -> usize {
        let count = self
            .rest()
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        self.at += count;
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_in_python() {
        for (text, value) in [
            ("-0", JsonValue::Integer(0)),
            ("18446744073709551616", JsonValue::Integer(1 << 64)),
            (
                "123456789012345678901234567890",
                JsonValue::Integer(123_456_789_012_345_678_901_234_567_890),
            ),
            ("1e21", JsonValue::Float(1e21)),
            ("10000000000000000000.0", JsonValue::Float(1e19)),
            ("1E+2", JsonValue::Float(100.0)),
            ("1e400", JsonValue::Float(f64::INFINITY)),
            ("-Infinity", JsonValue::Float(f64::NEG_INFINITY)),
        ] {
            assert_eq!(JsonValue::parse(text), Ok(value), "{text}");
        }
        let Ok(JsonValue::Float(zero)) = JsonValue::parse("-0.0") else {
            panic!()
        };
        assert!(zero == 0.0 && zero.is_sign_negative());
        let Ok(JsonValue::Float(nan)) = JsonValue::parse("NaN") else {
            panic!()
        };
        assert!(nan.is_nan());
    }

    #[test]
    fn last_equal_key_wins_at_first_position() {
        let read = JsonValue::parse(r#" {"x":1,"y":2,"x":{"z":1,"z":2}} "#).unwrap();
        let inner = JsonValue::object([("z", JsonValue::Integer(2))]);
        let entries: Vec<_> = read.as_object().unwrap().iter().collect();
        assert_eq!(
            entries,
            [
                (&"x".to_owned(), &inner),
                (&"y".to_owned(), &JsonValue::Integer(2))
            ]
        );
    }

    #[test]
    fn text_rejected_by_python_is_invalid() {
        for text in [
            "",
            " ",
            "{",
            "{'a':1}",
            "{\"a\":1,}",
            "[1,]",
            "01",
            "+1",
            "1.",
            ".5",
            "-",
            "1e",
            "\"a\nb\"",
            "\u{feff}1",
            "\u{a0}1",
            "1 2",
            "tru",
            "\"\\x\"",
        ] {
            assert_eq!(JsonValue::parse(text), Err(JsonError::Invalid), "{text:?}");
        }
    }

    #[test]
    fn python_only_value_is_unsupported() {
        let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
        let shallow = format!("{}1{}", "[".repeat(200), "]".repeat(200));
        assert!(JsonValue::parse(&shallow).is_ok());
        for text in [r#""\ud83d""#, &"9".repeat(40), &deep] {
            assert!(matches!(
                JsonValue::parse(text),
                Err(JsonError::Unsupported(_))
            ));
            let field: Vec<JsonValue> = serde_json::from_str(&format!("[{text}]")).unwrap();
            assert!(matches!(field[..], [JsonValue::Unknown(_)]));
        }
    }
}
