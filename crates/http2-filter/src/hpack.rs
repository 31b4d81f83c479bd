//! HPACK header blocks (RFC 7541): replaces values of `:authority`, and maintains the part of the
//! dynamic table that this requires.

use std::collections::VecDeque;

use crate::authority::replacement;
use crate::huffman;

/// Initial and maximum size of the dynamic table. This is the default of HTTP/2, because the server
/// does not announce SETTINGS_HEADER_TABLE_SIZE.
const TABLE_SIZE: usize = 4096;
/// Size of a table entry in addition to its name and value (RFC 7541, section 4.1).
const ENTRY_OVERHEAD: usize = 32;
/// Length of the name `:authority`.
const NAME_LENGTH: usize = 10;
/// Index of `:authority` in the static table.
const STATIC_AUTHORITY: usize = 1;
/// Lengths of the names in the static table. The first element has index 1.
const STATIC_NAMES: [u8; 61] = [
    10, 7, 7, 5, 5, 7, 7, 7, 7, 7, 7, 7, 7, 7, 14, 15, 15, 13, 6, 27, 3, 5, 13, 13, 19, 16, 16, 14,
    16, 13, 12, 6, 4, 4, 6, 7, 4, 4, 8, 17, 13, 8, 19, 13, 4, 8, 12, 18, 19, 5, 7, 7, 11, 6, 10,
    25, 17, 10, 4, 3, 16,
];
/// Maximum octets of an encoded integer. `h2` has the same limit.
const INTEGER_LENGTH: usize = 5;

/// The header block is invalid, and `h2` refuses it as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HpackError;

/// Entry of the dynamic table.
#[derive(Clone, Copy, Debug)]
struct HpackEntry {
    name: FieldName,
    value_length: usize,
}

/// Dynamic table of a connection, reduced to the sizes of its entries.
pub(crate) struct DynamicTable {
    /// Newest entry first.
    entries: VecDeque<HpackEntry>,
    size: usize,
    limit: usize,
}

/// Properties of a header field name.
#[derive(Clone, Copy, Debug)]
struct FieldName {
    length: usize,
    is_authority: bool,
}

/// String literal with its position in the block.
struct HpackString<'a> {
    octets: &'a [u8],
    huffman: bool,
    /// Position of the length prefix.
    start: usize,
}

impl HpackEntry {
    fn size(&self) -> usize {
        self.name.length + self.value_length + ENTRY_OVERHEAD
    }
}

impl DynamicTable {
    pub(crate) fn new() -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            limit: TABLE_SIZE,
        }
    }

    /// Applies a complete header block. If a value of `:authority` must be replaced, returns the
    /// new block, which is not longer.
    pub(crate) fn apply(&mut self, block: &[u8]) -> Result<Option<Vec<u8>>, HpackError> {
        let mut reader = BlockReader { block, at: 0 };
        let mut edited = EditedBlock {
            block,
            copied: 0,
            output: Vec::new(),
        };
        while let Some(&first) = block.get(reader.at) {
            if first & 0x80 != 0 {
                self.name_at(reader.integer(7)?)?;
            } else if first & 0x40 != 0 {
                let entry = self.literal(&mut reader, 6, &mut edited)?;
                self.insert(entry);
            } else if first & 0x20 != 0 {
                self.resize(reader.integer(5)?)?;
            } else {
                self.literal(&mut reader, 4, &mut edited)?;
            }
        }
        Ok(edited.finish())
    }

    /// Returns the name of an entry of the static or the dynamic table.
    fn name_at(&self, index: usize) -> Result<FieldName, HpackError> {
        let at = index.checked_sub(1).ok_or(HpackError)?;
        if let Some(&length) = STATIC_NAMES.get(at) {
            return Ok(FieldName {
                length: usize::from(length),
                is_authority: index == STATIC_AUTHORITY,
            });
        }
        let entry = self.entries.get(at - STATIC_NAMES.len());
        entry.map(|entry| entry.name).ok_or(HpackError)
    }

    fn literal<'a>(
        &self,
        reader: &mut BlockReader<'a>,
        prefix: u32,
        edited: &mut EditedBlock<'a>,
    ) -> Result<HpackEntry, HpackError> {
        let index = reader.integer(prefix)?;
        let name = if index == 0 {
            reader.string()?.name()?
        } else {
            self.name_at(index)?
        };
        let value = reader.string()?;
        // The length of a value that is not added to a table is irrelevant.
        let value_length = if prefix == 6 || name.is_authority {
            value.decoded_len()?
        } else {
            0
        };
        if name.is_authority
            && let Some(replaced) = replacement(&value.decoded()?)
        {
            edited.replace(&value, reader.at, &replaced);
        }
        Ok(HpackEntry { name, value_length })
    }

    fn insert(&mut self, entry: HpackEntry) {
        self.evict_to(self.limit.saturating_sub(entry.size()));
        if self.size + entry.size() <= self.limit {
            self.size += entry.size();
            self.entries.push_front(entry);
        }
    }

    fn resize(&mut self, limit: usize) -> Result<(), HpackError> {
        if limit > TABLE_SIZE {
            return Err(HpackError);
        }
        self.limit = limit;
        self.evict_to(limit);
        Ok(())
    }

    fn evict_to(&mut self, size: usize) {
        while self.size > size {
            let Some(evicted) = self.entries.pop_back() else {
                return;
            };
            self.size -= evicted.size();
        }
    }
}

/// Reader of a header block.
struct BlockReader<'a> {
    block: &'a [u8],
    at: usize,
}

impl<'a> BlockReader<'a> {
    /// Reads an integer with a prefix of `prefix` bits (RFC 7541, section 5.1).
    fn integer(&mut self, prefix: u32) -> Result<usize, HpackError> {
        let mask = (1 << prefix) - 1;
        let octets = self.block[self.at..].iter().take(INTEGER_LENGTH);
        let mut value = 0;
        for (at, &octet) in octets.enumerate() {
            self.at += 1;
            if at == 0 {
                value = usize::from(octet & mask);
                if value < usize::from(mask) {
                    return Ok(value);
                }
                continue;
            }
            value += usize::from(octet & 0x7f) << (7 * (at - 1));
            if octet & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(HpackError)
    }

    fn string(&mut self) -> Result<HpackString<'a>, HpackError> {
        let start = self.at;
        let huffman = self.block.get(start).ok_or(HpackError)? & 0x80 != 0;
        let length = self.integer(7)?;
        let octets = self.block[self.at..].get(..length).ok_or(HpackError)?;
        self.at += length;
        Ok(HpackString {
            octets,
            huffman,
            start,
        })
    }
}

impl HpackString<'_> {
    fn decoded(&self) -> Result<Vec<u8>, HpackError> {
        if self.huffman {
            huffman::decode(self.octets).ok_or(HpackError)
        } else {
            Ok(self.octets.to_vec())
        }
    }

    fn decoded_len(&self) -> Result<usize, HpackError> {
        if self.huffman {
            huffman::decoded_len(self.octets).ok_or(HpackError)
        } else {
            Ok(self.octets.len())
        }
    }

    fn name(&self) -> Result<FieldName, HpackError> {
        let length = self.decoded_len()?;
        if length == 0 {
            return Err(HpackError);
        }
        Ok(FieldName {
            length,
            is_authority: length == NAME_LENGTH && self.decoded()? == b":authority",
        })
    }
}

/// Copy of a header block with replaced values. Nothing is copied before the first replacement.
struct EditedBlock<'a> {
    block: &'a [u8],
    copied: usize,
    output: Vec<u8>,
}

impl EditedBlock<'_> {
    /// Replaces `value`, which ends at `end`, with `octets` in the same coding.
    fn replace(&mut self, value: &HpackString<'_>, end: usize, octets: &[u8]) {
        self.output
            .extend_from_slice(&self.block[self.copied..value.start]);
        if value.huffman {
            let encoded = huffman::encode(octets);
            push_length(&mut self.output, 0x80, encoded.len());
            self.output.extend_from_slice(&encoded);
        } else {
            push_length(&mut self.output, 0, octets.len());
            self.output.extend_from_slice(octets);
        }
        self.copied = end;
    }

    fn finish(mut self) -> Option<Vec<u8>> {
        if self.copied == 0 {
            return None;
        }
        self.output.extend_from_slice(&self.block[self.copied..]);
        Some(self.output)
    }
}

/// Appends the length of a string: an integer with a prefix of seven bits.
fn push_length(output: &mut Vec<u8>, coding: u8, length: usize) {
    if length < 0x7f {
        output.push(coding | length as u8);
        return;
    }
    output.push(coding | 0x7f);
    let mut rest = length - 0x7f;
    while rest >= 0x80 {
        output.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    output.push(rest as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a literal field with incremental indexing.
    fn indexed(name: &str, value: &str) -> Vec<u8> {
        let mut block = vec![0x40];
        push_length(&mut block, 0, name.len());
        block.extend(name.as_bytes());
        push_length(&mut block, 0, value.len());
        block.extend(value.as_bytes());
        block
    }

    /// Returns a literal field whose name is given by `index`, the first octet of the field.
    fn named(index: u8, value: &[u8], huffman: bool) -> Vec<u8> {
        let octets = if huffman {
            huffman::encode(value)
        } else {
            value.to_vec()
        };
        let mut block = vec![index];
        push_length(&mut block, if huffman { 0x80 } else { 0 }, octets.len());
        block.extend(octets);
        block
    }

    #[test]
    fn authority_is_replaced_in_every_representation() {
        for huffman in [false, true] {
            for first in [0x01, 0x11, 0x41] {
                let block = named(first, b"outbound|9002||x", huffman);
                let expected = named(first, b"outbound+9002++x", huffman);
                assert_eq!(
                    DynamicTable::new().apply(&block),
                    Ok(Some(expected)),
                    "{first:#x} {huffman}"
                );
            }
            let block = [indexed(":authority", "a/b"), vec![0x80 | 62]].concat();
            let expected = [indexed(":authority", "a=b"), vec![0x80 | 62]].concat();
            assert_eq!(DynamicTable::new().apply(&block), Ok(Some(expected)));
        }
    }

    #[test]
    fn valid_values_and_other_fields_are_not_replaced() {
        for block in [
            named(0x01, b"picker.ns.svc:9002", true),
            named(0x01, b"", false),
            named(0x04, b"/a|b", true),
            indexed("x-authority", "a|b"),
            vec![0x82, 0x86],
        ] {
            assert_eq!(DynamicTable::new().apply(&block), Ok(None), "{block:x?}");
        }
    }

    #[test]
    fn authority_is_found_by_dynamic_table_index() {
        let mut table = DynamicTable::new();
        table
            .apply(&[indexed(":authority", "a"), indexed("x-other", "b")].concat())
            .unwrap();
        // Index 62 is x-other, and index 63 is :authority.
        assert_eq!(
            table.apply(&named(0x0f, b"", false)[..1]),
            Err(HpackError),
            "cut after the prefix"
        );
        let literal = |index: u8| [&[0x0f, index - 15, 3][..], b"c|d"].concat();
        assert_eq!(table.apply(&literal(62)), Ok(None));
        assert_eq!(table.apply(&literal(63)).unwrap().unwrap()[3..], *b"c+d");
        assert_eq!(table.apply(&literal(64)), Err(HpackError), "no such entry");
    }

    #[test]
    fn entries_are_evicted_by_size() {
        let mut table = DynamicTable::new();
        table.apply(&indexed(":authority", "a")).unwrap();
        // 4096 - 43 octets remain; one more octet evicts the authority.
        table
            .apply(&indexed("x", &"y".repeat(4096 - 43 - 33)))
            .unwrap();
        assert_eq!(table.entries.len(), 2);
        table.apply(&indexed("x", "")).unwrap();
        assert_eq!((table.entries.len(), table.size), (2, 4096 - 43 + 33));
        table.apply(&indexed("x", &"y".repeat(5000))).unwrap();
        assert_eq!(
            (table.entries.len(), table.size),
            (0, 0),
            "an entry larger than the table empties it"
        );
        assert_eq!(
            table.apply(&[0x3f, 0xe2, 0x1f]),
            Err(HpackError),
            "4097 octets"
        );
        table.apply(&[0x3f, 0xe1, 0x1f]).unwrap();
        table.apply(&[0x20]).unwrap();
        table.apply(&indexed("x", "")).unwrap();
        assert_eq!(table.entries.len(), 0);
    }

    #[test]
    fn static_table_name_lengths_match_the_rfc() {
        // A sample of RFC 7541, appendix A.
        for (index, name) in [
            (1, ":authority"),
            (2, ":method"),
            (14, ":status"),
            (15, "accept-charset"),
            (20, "access-control-allow-origin"),
            (31, "content-type"),
            (50, "range"),
            (56, "strict-transport-security"),
            (58, "user-agent"),
            (59, "vary"),
            (61, "www-authenticate"),
        ] {
            assert_eq!(usize::from(STATIC_NAMES[index - 1]), name.len(), "{name}");
        }
    }
}
