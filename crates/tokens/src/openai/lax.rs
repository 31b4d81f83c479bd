//! Numbers and booleans in pydantic's lax mode, which engines use to validate requests. Whole
//! floats, booleans and strings of digits are accepted as integers. `0`, `1` and some words are
//! accepted as booleans.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserialize, Deserializer, Unexpected, Visitor};

/// Largest integer that a double represents exactly.
const MAX_EXACT_INTEGER: f64 = 9_007_199_254_740_992.0;

/// An integer in lax mode.
pub(super) struct LaxInteger<T>(T);

/// A boolean in lax mode.
pub(super) struct LaxBool(bool);

impl<T> LaxInteger<T> {
    pub(super) fn get(self) -> T {
        self.0
    }
}

impl LaxBool {
    pub(super) fn get(self) -> bool {
        self.0
    }
}

impl<'de, T: TryFrom<i128>> Deserialize<'de> for LaxInteger<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LaxIntegerVisitor(PhantomData))
    }
}

struct LaxIntegerVisitor<T>(PhantomData<T>);

impl<T: TryFrom<i128>> LaxIntegerVisitor<T> {
    fn number<E: de::Error>(self, number: i128) -> Result<LaxInteger<T>, E> {
        T::try_from(number)
            .map(LaxInteger)
            .map_err(|_| E::invalid_value(Unexpected::Other("a number"), &self))
    }
}

impl<T: TryFrom<i128>> Visitor<'_> for LaxIntegerVisitor<T> {
    type Value = LaxInteger<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an integer in range")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
        self.number(number.into())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
        self.number(number.into())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
        if number.fract() != 0.0 || number.abs() > MAX_EXACT_INTEGER {
            return Err(E::invalid_value(Unexpected::Float(number), &self));
        }
        self.number(number as i128)
    }

    fn visit_bool<E: de::Error>(self, flag: bool) -> Result<Self::Value, E> {
        self.number(flag.into())
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        let whole = text
            .split_once('.')
            .filter(|(_, zeros)| zeros.bytes().all(|byte| byte == b'0') && !zeros.is_empty());
        let digits = whole.map_or(text, |(digits, _)| digits);
        match digits.parse() {
            Ok(number) => self.number(number),
            Err(_) => Err(E::invalid_value(Unexpected::Other("a string"), &self)),
        }
    }
}

impl<'de> Deserialize<'de> for LaxBool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LaxBoolVisitor)
    }
}

struct LaxBoolVisitor;

impl Visitor<'_> for LaxBoolVisitor {
    type Value = LaxBool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a boolean")
    }

    fn visit_bool<E>(self, flag: bool) -> Result<LaxBool, E> {
        Ok(LaxBool(flag))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<LaxBool, E> {
        match number {
            0 | 1 => Ok(LaxBool(number == 1)),
            _ => Err(E::invalid_value(Unexpected::Unsigned(number), &self)),
        }
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<LaxBool, E> {
        if number == 0.0 || number == 1.0 {
            return Ok(LaxBool(number == 1.0));
        }
        Err(E::invalid_value(Unexpected::Float(number), &self))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<LaxBool, E> {
        match text.to_ascii_lowercase().as_str() {
            "1" | "on" | "t" | "true" | "y" | "yes" => Ok(LaxBool(true)),
            "0" | "off" | "f" | "false" | "n" | "no" => Ok(LaxBool(false)),
            _ => Err(E::invalid_value(Unexpected::Other("a string"), &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are those of pydantic 2.13.
    #[test]
    fn values_are_coerced_as_in_pydantic() {
        let integer = |json: &str| {
            serde_json::from_str(json)
                .ok()
                .map(|LaxInteger::<u32>(number)| number)
        };
        for (json, expected) in [
            ("2", Some(2)),
            ("2.0", Some(2)),
            (r#""2""#, Some(2)),
            (r#""2.0""#, Some(2)),
            (r#""+2""#, Some(2)),
            (r#""02""#, Some(2)),
            ("true", Some(1)),
            ("2.5", None),
            ("1e300", None),
            (r#""2.50""#, None),
            (r#""2.""#, None),
            (r#""2e0""#, None),
            (r#""""#, None),
            ("-1", None),
            ("null", None),
        ] {
            assert_eq!(integer(json), expected, "{json}");
        }
        let flag = |json: &str| serde_json::from_str(json).ok().map(|LaxBool(flag)| flag);
        for (json, expected) in [
            ("true", Some(true)),
            ("0", Some(false)),
            ("1.0", Some(true)),
            ("-0.0", Some(false)),
            (r#""Yes""#, Some(true)),
            (r#""off""#, Some(false)),
            (r#"" true""#, None),
            ("2", None),
        ] {
            assert_eq!(flag(json), expected, "{json}");
        }
    }
}
