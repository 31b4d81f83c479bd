//! Values that are deserialized from a text or a list, without a copy of the list.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Unexpected, Visitor};

/// A value that is deserialized from a text, or from a list whose elements are added one by one.
pub(super) trait FoldSequence: Default {
    type Element: for<'de> Deserialize<'de>;

    /// Creates the value from a text. Returns `None` if only a list is allowed.
    fn from_text(text: &str) -> Option<Self>;
    fn add_element(&mut self, element: Self::Element);
}

/// Deserializes a value from a text, or from a list element by element.
pub(super) fn fold_sequence<'de, T: FoldSequence, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    deserializer.deserialize_any(FoldSequenceVisitor(PhantomData))
}

struct FoldSequenceVisitor<T>(PhantomData<T>);

impl<'de, T: FoldSequence> Visitor<'de> for FoldSequenceVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a list")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        T::from_text(text)
            .ok_or_else(|| E::invalid_type(Unexpected::Str(text), &"a list of messages"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<T, A::Error> {
        let mut folded = T::default();
        while let Some(element) = seq.next_element()? {
            folded.add_element(element);
        }
        Ok(folded)
    }
}

macro_rules! folded {
    ($($kind:ident),*) => {
        $(impl<'de> serde::Deserialize<'de> for $kind {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                super::fold::fold_sequence(deserializer)
            }
        })*
    };
}

pub(super) use folded;
