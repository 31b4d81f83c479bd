//! Fields of an event in both encodings, as undecoded MessagePack values. Arrays identify fields by
//! position, with a tail whose length depends on the engine version. Maps identify them by name.

use super::value::{self, BlockMedia, SizedList};

/// Known field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventField {
    Type,
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    CacheSalt,
    ExtraKeys,
    Media,
    Group,
    Kind,
    Window,
    Locality,
    Ownership,
    /// SGLang's session, which does not identify blocks.
    Session,
    /// Tokens after each block that its hash covers (vLLM with EAGLE or MTP).
    Lookahead,
}

/// Names of the fields in the map encoding, in the order of [`EventField`].
const NAMES: [(EventField, &str); 18] = [
    (EventField::Type, "type"),
    (EventField::Hashes, "block_hashes"),
    (EventField::Parent, "parent_block_hash"),
    (EventField::Tokens, "token_ids"),
    (EventField::BlockSize, "block_size"),
    (EventField::LoraId, "lora_id"),
    (EventField::Medium, "medium"),
    (EventField::LoraName, "lora_name"),
    (EventField::CacheSalt, "cache_salt"),
    (EventField::ExtraKeys, "extra_keys"),
    (EventField::Media, "block_mm_infos"),
    (EventField::Group, "group_idx"),
    (EventField::Kind, "kv_cache_spec_kind"),
    (EventField::Window, "kv_cache_spec_sliding_window"),
    (EventField::Locality, "locality"),
    (EventField::Ownership, "ownership"),
    (EventField::Session, "session_id"),
    (EventField::Lookahead, "lookahead_token_ids"),
];

impl EventField {
    /// Returns the field with a name in the map encoding.
    pub(super) fn of(name: &[u8]) -> Option<Self> {
        let (field, _) = NAMES.iter().find(|(_, known)| known.as_bytes() == name)?;
        Some(*field)
    }

    /// Returns the name in the map encoding.
    pub(super) fn name(self) -> &'static str {
        NAMES[self as usize].1
    }
}

/// Type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventType {
    Stored,
    Removed,
    Cleared,
    Ignored,
}

impl EventType {
    /// Returns the type with a name.
    pub(super) fn of(name: &[u8]) -> Option<Self> {
        match name {
            b"BlockStored" => Some(EventType::Stored),
            b"BlockRemoved" => Some(EventType::Removed),
            b"AllBlocksCleared" => Some(EventType::Cleared),
            b"Ignored" => Some(EventType::Ignored),
            _ => None,
        }
    }

    /// Returns the fields with fixed positions in the array encoding.
    pub(super) fn positions(self) -> &'static [EventField] {
        match self {
            EventType::Stored => &[
                EventField::Type,
                EventField::Hashes,
                EventField::Parent,
                EventField::Tokens,
                EventField::BlockSize,
                EventField::LoraId,
                EventField::Medium,
                EventField::LoraName,
                EventField::ExtraKeys,
            ],
            EventType::Removed => &[EventField::Type, EventField::Hashes, EventField::Medium],
            EventType::Cleared => &[EventField::Type, EventField::Ownership],
            EventType::Ignored => &[EventField::Type],
        }
    }

    /// Returns true if the array encoding has a tail after the fixed positions.
    pub(super) fn has_tail(self) -> bool {
        matches!(self, EventType::Stored | EventType::Removed)
    }
}

/// Maximum number of known tail elements in any layout.
pub(super) const MAX_TAIL: usize = 8;

/// Encoding of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum EventEncoding {
    #[default]
    Array,
    Map,
}

/// One event with undecoded fields. A missing field is empty.
#[derive(Debug, Default)]
pub(super) struct EventFields<'a> {
    pub(super) encoding: EventEncoding,
    fields: [&'a [u8]; NAMES.len()],
}

impl<'a> EventFields<'a> {
    pub(super) fn set(&mut self, field: EventField, value: &'a [u8]) {
        self.fields[field as usize] = value;
    }

    /// Returns a field, unless it is missing or nil.
    pub(super) fn get(&self, field: EventField) -> Option<&'a [u8]> {
        Some(self.fields[field as usize]).filter(|value| !matches!(value, [] | [NIL]))
    }

    /// Assigns the elements after the fields with fixed positions. Four or more elements of the
    /// right types are the layout of newer engines. Other tails are searched by type, because older
    /// engines omit elements. Returns the number of unknown elements.
    pub(super) fn set_tail(&mut self, tail: &[&'a [u8]]) -> usize {
        const LAYOUT: [(EventField, TailType); 5] = [
            (EventField::Group, TailType::Number),
            (EventField::Kind, TailType::Text),
            (EventField::Window, TailType::Number),
            (EventField::Locality, TailType::Text),
            (EventField::Ownership, TailType::Text),
        ];
        let fits = |(value, (_, expected)): (&&[u8], &(EventField, TailType))| {
            let found = TailType::of(value);
            found == TailType::Nil || found == *expected
        };
        if tail.len() >= 4 && tail.iter().zip(&LAYOUT).all(fits) {
            for (value, (field, _)) in tail.iter().zip(LAYOUT) {
                self.set(field, value);
            }
            return tail.len().saturating_sub(LAYOUT.len());
        }
        let mut unknown = 0;
        for value in tail {
            match TailType::of(value) {
                TailType::Nil => {}
                TailType::Number if self.get(EventField::Group).is_none() => {
                    self.set(EventField::Group, value)
                }
                TailType::Number if self.get(EventField::Window).is_none() => {
                    self.set(EventField::Window, value)
                }
                TailType::Text => self.set(EventField::Kind, value),
                TailType::Media => self.set(EventField::Media, value),
                TailType::Number | TailType::Unknown => unknown += 1,
            }
        }
        unknown
    }
}

/// MessagePack's nil.
const NIL: u8 = 0xc0;

/// Type of a tail element.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TailType {
    Nil,
    Number,
    Text,
    Media,
    Unknown,
}

impl TailType {
    fn of(value: &[u8]) -> Self {
        if value == [NIL] {
            TailType::Nil
        } else if value::decode::<u32>(value).is_some() {
            TailType::Number
        } else if value::decode::<&str>(value).is_some() {
            TailType::Text
        } else if value::decode::<SizedList<Option<BlockMedia>>>(value).is_some() {
            TailType::Media
        } else {
            TailType::Unknown
        }
    }
}
