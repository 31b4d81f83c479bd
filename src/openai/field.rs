//! One text in a body, found without keeping anything else of it: a body may have millions of keys, and only the operator
//! knows which one is wanted.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer as _, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// A text in a body, by a path with dots.
pub fn text_of(body: &[u8], path: &str) -> Option<String> {
    let mut value: &RawValue = serde_json::from_slice(body).ok()?;
    for step in path.split('.') {
        value = serde_json::Deserializer::from_str(value.get())
            .deserialize_map(Under(step))
            .ok()??;
    }
    serde_json::from_str(value.get()).ok()
}

/// Reads an object and keeps what stands under one key; the last, if there are several.
struct Under<'k>(&'k str);

impl<'de> Visitor<'de> for Under<'_> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(wanted) = map.next_key_seed(Is(self.0))? {
            if wanted {
                found = Some(map.next_value()?);
            } else {
                let IgnoredAny = map.next_value()?;
            }
        }
        Ok(found)
    }
}

/// Whether a key is the wanted one.
struct Is<'k>(&'k str);

impl<'de> DeserializeSeed<'de> for Is<'_> {
    type Value = bool;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Is<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<bool, E> {
        Ok(key == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_by_its_path_and_nothing_else_is() {
        let body = r#"{"x":[{"a":"no"}],"a":{"b":"old"},"\u0061":{"c":{},"b":"new","n":7},"t":"top","e\"s":"q"}"#;
        let cases = [
            ("t", Some("top")),
            ("a.b", Some("new")),
            ("a.n", None),
            ("a.c", None),
            ("a", None),
            ("a.b.c", None),
            ("x.a", None),
            ("none", None),
            ("", None),
            ("e\"s", Some("q")),
        ];
        for (path, expected) in cases {
            assert_eq!(
                text_of(body.as_bytes(), path).as_deref(),
                expected,
                "{path}"
            );
        }
        for bad in [
            &b"\xff"[..],
            b"",
            b"[]",
            br#"{"t":"top"} x"#,
            br#"{"t":"top""#,
        ] {
            assert_eq!(text_of(bad, "t"), None);
        }
    }
}
