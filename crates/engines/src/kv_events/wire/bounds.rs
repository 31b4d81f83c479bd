//! Splits a batch into events and fields, and checks its limits. Each event is checked before it is
//! decoded: the reader counts the elements for which decoding allocates memory, so that a small
//! payload cannot use a lot of memory.
//!
//! A decoded batch takes at most about 180 MiB: 128 Ki events of 300 bytes, 1 Mi hashes of 8 bytes,
//! 16 Mi tokens of 4 bytes, and 1 Mi each of extra-key lists, extra keys and multimodal objects of
//! 24 to 40 bytes.

use super::fields::{EventEncoding, EventField, EventFields, EventType, MAX_TAIL};
use super::{BatchLimit, WireError};

/// Maximum number of events in a batch. Engines publish one event per evicted block.
const EVENTS: usize = 1 << 17;
/// Maximum number of block hashes in a batch.
const HASHES: usize = 1 << 20;
/// Maximum number of tokens in a batch.
const TOKENS: usize = 1 << 24;
/// Maximum number of lists of extra keys in an event beyond its number of blocks. They are ignored.
const SPARE_LISTS: usize = 16;
/// Maximum number of extra keys or multimodal objects of one block.
const KEYS_PER_BLOCK: usize = 64;
/// Maximum number of extra keys and multimodal objects in a batch, and of lists of them.
const KEYS: usize = 1 << 20;

/// Reads the values of one batch in order.
#[derive(Default)]
pub(super) struct BatchReader<'a> {
    reader: MessagePackReader<'a>,
    hashes: usize,
    tokens: usize,
    lists: usize,
    keys: usize,
    unknown_fields: u64,
}

/// Content of a field, as far as decoding allocates memory for its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldContent {
    Hashes,
    Tokens,
    /// Extra keys, multimodal objects or lookahead tokens: one list per block.
    Keys,
    Other,
}

impl From<EventField> for FieldContent {
    fn from(field: EventField) -> Self {
        match field {
            EventField::Hashes => FieldContent::Hashes,
            EventField::Tokens => FieldContent::Tokens,
            EventField::ExtraKeys | EventField::Media | EventField::Lookahead => FieldContent::Keys,
            _ => FieldContent::Other,
        }
    }
}

impl<'a> BatchReader<'a> {
    pub(super) fn new(payload: &'a [u8]) -> Self {
        Self {
            reader: MessagePackReader { rest: payload },
            ..Self::default()
        }
    }

    /// Returns the number of skipped elements and fields.
    pub(super) fn unknown_fields(&self) -> u64 {
        self.unknown_fields
    }

    /// Reads the head of an array and returns its length.
    pub(super) fn read_array_length(&mut self, name: &'static str) -> Result<usize, WireError> {
        match self.reader.value()? {
            ValueHead::Array(elements) => Ok(elements),
            _ => Err(WireError::Malformed(name)),
        }
    }

    /// Reads one value without decoding it.
    pub(super) fn read_raw(&mut self) -> Result<&'a [u8], WireError> {
        let start = self.reader.rest;
        self.reader.skip(1)?;
        Ok(self.reader.since(start))
    }

    /// Skips and counts an unknown value.
    pub(super) fn skip_unknown(&mut self) -> Result<(), WireError> {
        self.unknown_fields += 1;
        self.reader.skip(1)
    }

    /// Reads the head of the list of events and returns their number.
    pub(super) fn event_count(&mut self) -> Result<usize, WireError> {
        let events = self.read_array_length("events")?;
        if events > EVENTS {
            return Err(WireError::TooLarge(BatchLimit::Events));
        }
        Ok(events)
    }

    /// Reads one event. A value that is neither an array nor a map has no fields.
    pub(super) fn event(&mut self) -> Result<EventFields<'a>, WireError> {
        let hashes = self.hashes;
        let mut event = EventFields::default();
        let lists = match self.reader.value()? {
            ValueHead::Array(fields) => self.array_event(fields, &mut event)?,
            ValueHead::Map(fields) => self.map_event(fields, &mut event)?,
            ValueHead::Bytes(_) | ValueHead::Scalar => 0,
        };
        // A field may precede the hashes, so the number of blocks is known only here.
        if lists > self.hashes - hashes + SPARE_LISTS {
            return Err(WireError::TooLarge(BatchLimit::ExtraKeys));
        }
        Ok(event)
    }

    /// Reads an event in the array encoding. Returns the largest number of per-block lists in a
    /// field.
    fn array_event(
        &mut self,
        fields: usize,
        event: &mut EventFields<'a>,
    ) -> Result<usize, WireError> {
        if fields == 0 {
            return Ok(0);
        }
        let start = self.reader.rest;
        let tag = self.reader.value()?;
        self.reader.skip_content(tag)?;
        event.set(EventField::Type, self.reader.since(start));
        let known = match tag {
            ValueHead::Bytes(name) => EventType::of(name),
            _ => None,
        };
        let Some(known) = known else {
            self.reader.skip(fields - 1)?;
            return Ok(0);
        };
        let mut lists = 0;
        let mut tail = Vec::new();
        for at in 1..fields {
            if let Some(&field) = known.positions().get(at) {
                let (value, own) = self.field(field.into())?;
                event.set(field, value);
                lists = lists.max(own);
            } else if known.has_tail() && tail.len() < MAX_TAIL {
                // The decoder searches the tail for multimodal objects.
                let (value, own) = self.field(FieldContent::Keys)?;
                tail.push(value);
                lists = lists.max(own);
            } else {
                self.skip_unknown()?;
            }
        }
        self.unknown_fields += event.set_tail(&tail) as u64;
        Ok(lists)
    }

    /// Reads an event in the map encoding. Returns the largest number of per-block lists in a
    /// field.
    fn map_event(
        &mut self,
        fields: usize,
        event: &mut EventFields<'a>,
    ) -> Result<usize, WireError> {
        event.encoding = EventEncoding::Map;
        let mut lists = 0;
        for _ in 0..fields {
            let name = self.reader.value()?;
            self.reader.skip_content(name)?;
            let field = match name {
                ValueHead::Bytes(name) => EventField::of(name),
                _ => None,
            };
            let Some(field) = field else {
                self.skip_unknown()?;
                continue;
            };
            let (value, own) = self.field(field.into())?;
            event.set(field, value);
            lists = lists.max(own);
        }
        Ok(lists)
    }

    /// Reads and counts one field. Returns it with its number of per-block lists, or 0 if it has
    /// none.
    fn field(&mut self, content: FieldContent) -> Result<(&'a [u8], usize), WireError> {
        let start = self.reader.rest;
        let lists = self.count_field(content)?;
        Ok((self.reader.since(start), lists))
    }

    fn count_field(&mut self, content: FieldContent) -> Result<usize, WireError> {
        let value = self.reader.value()?;
        let ValueHead::Array(elements) = value else {
            self.reader.skip_content(value)?;
            return Ok(0);
        };
        match content {
            FieldContent::Hashes => count(&mut self.hashes, elements, HASHES, BatchLimit::Hashes)?,
            FieldContent::Tokens => count(&mut self.tokens, elements, TOKENS, BatchLimit::Tokens)?,
            FieldContent::Other => {}
            FieldContent::Keys => {
                count(&mut self.lists, elements, KEYS, BatchLimit::ExtraKeys)?;
                for _ in 0..elements {
                    let keys = self.block_keys()?;
                    if keys > KEYS_PER_BLOCK {
                        return Err(WireError::TooLarge(BatchLimit::ExtraKeys));
                    }
                    count(&mut self.keys, keys, KEYS, BatchLimit::ExtraKeys)?;
                }
                return Ok(elements);
            }
        }
        self.reader.skip(elements)?;
        Ok(0)
    }

    /// Counts the extra keys of a block, which are an array, or its multimodal objects, which are
    /// an array inside an array or a map. The elements of arrays at both depths are counted.
    fn block_keys(&mut self) -> Result<usize, WireError> {
        let block = self.reader.value()?;
        let mut keys = if let ValueHead::Array(elements) = block {
            elements
        } else {
            0
        };
        for _ in 0..block.children() {
            let inner = self.reader.value()?;
            if let ValueHead::Array(elements) = inner {
                keys = keys.saturating_add(elements);
            }
            self.reader.skip_content(inner)?;
        }
        Ok(keys)
    }
}

fn count(
    counter: &mut usize,
    more: usize,
    limit: usize,
    exceeded: BatchLimit,
) -> Result<(), WireError> {
    *counter = counter.saturating_add(more);
    if *counter > limit {
        Err(WireError::TooLarge(exceeded))
    } else {
        Ok(())
    }
}

/// The head of a MessagePack value. The content of arrays and maps follows it.
#[derive(Clone, Copy)]
enum ValueHead<'a> {
    Scalar,
    /// Text or bytes.
    Bytes(&'a [u8]),
    Array(usize),
    Map(usize),
}

impl ValueHead<'_> {
    /// Returns the number of values inside it.
    fn children(self) -> usize {
        match self {
            ValueHead::Scalar | ValueHead::Bytes(_) => 0,
            ValueHead::Array(elements) => elements,
            ValueHead::Map(entries) => entries.saturating_mul(2),
        }
    }
}

/// Reads MessagePack values one after the other.
#[derive(Default)]
struct MessagePackReader<'a> {
    rest: &'a [u8],
}

impl<'a> MessagePackReader<'a> {
    /// Returns the bytes that were read since `start`, an earlier value of `rest`.
    fn since(&self, start: &'a [u8]) -> &'a [u8] {
        &start[..start.len() - self.rest.len()]
    }

    fn value(&mut self) -> Result<ValueHead<'a>, WireError> {
        let [marker] = self.take()?;
        Ok(match marker {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => ValueHead::Scalar,
            0x80..=0x8f => self.map(usize::from(marker & 0x0f))?,
            0x90..=0x9f => self.array(usize::from(marker & 0x0f))?,
            0xa0..=0xbf => self.bytes(usize::from(marker & 0x1f))?,
            0xc4 | 0xd9 => self.length::<1>().and_then(|length| self.bytes(length))?,
            0xc5 | 0xda => self.length::<2>().and_then(|length| self.bytes(length))?,
            0xc6 | 0xdb => self.length::<4>().and_then(|length| self.bytes(length))?,
            0xc7 => self
                .length::<1>()
                .and_then(|length| self.scalar(length + 1))?,
            0xc8 => self
                .length::<2>()
                .and_then(|length| self.scalar(length + 1))?,
            0xc9 => self
                .length::<4>()
                .and_then(|length| self.scalar(length + 1))?,
            0xcc | 0xd0 => self.scalar(1)?,
            0xcd | 0xd1 | 0xd4 => self.scalar(2)?,
            0xd5 => self.scalar(3)?,
            0xca | 0xce | 0xd2 => self.scalar(4)?,
            0xd6 => self.scalar(5)?,
            0xcb | 0xcf | 0xd3 => self.scalar(8)?,
            0xd7 => self.scalar(9)?,
            0xd8 => self.scalar(17)?,
            0xdc => self.length::<2>().and_then(|length| self.array(length))?,
            0xdd => self.length::<4>().and_then(|length| self.array(length))?,
            0xde => self.length::<2>().and_then(|length| self.map(length))?,
            0xdf => self.length::<4>().and_then(|length| self.map(length))?,
            0xc1 => return Err(WireError::Truncated),
        })
    }

    /// Skips values with all their content.
    fn skip(&mut self, values: usize) -> Result<(), WireError> {
        let mut pending = values;
        while pending > 0 {
            pending = pending.saturating_add(self.value()?.children()) - 1;
        }
        Ok(())
    }

    /// Skips the content of a value whose head was read.
    fn skip_content(&mut self, value: ValueHead<'_>) -> Result<(), WireError> {
        self.skip(value.children())
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(WireError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    /// Reads a big-endian length of N bytes.
    fn length<const N: usize>(&mut self) -> Result<usize, WireError> {
        Ok(self
            .take::<N>()?
            .iter()
            .fold(0, |length, byte| length << 8 | usize::from(*byte)))
    }

    fn bytes(&mut self, length: usize) -> Result<ValueHead<'a>, WireError> {
        let (bytes, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(WireError::Truncated)?;
        self.rest = rest;
        Ok(ValueHead::Bytes(bytes))
    }

    fn scalar(&mut self, length: usize) -> Result<ValueHead<'a>, WireError> {
        self.bytes(length).map(|_| ValueHead::Scalar)
    }

    /// Returns the head of an array. Every element has at least one byte, so a length beyond the
    /// rest is invalid.
    fn array(&self, elements: usize) -> Result<ValueHead<'a>, WireError> {
        if elements > self.rest.len() {
            Err(WireError::Truncated)
        } else {
            Ok(ValueHead::Array(elements))
        }
    }

    fn map(&self, entries: usize) -> Result<ValueHead<'a>, WireError> {
        if entries > self.rest.len() {
            Err(WireError::Truncated)
        } else {
            Ok(ValueHead::Map(entries))
        }
    }
}

#[cfg(test)]
mod tests;
